"""torchvision's own layers."""

from torch import Tensor, nn
from torchvision.models import convnext
from torchvision.ops import misc

from razorctl.layers.base import RazorLayer
from razorctl.layers.gate import Gate
from razorctl.layers.norm import ChannelLayerNorm


class RazorLayerNorm2d(ChannelLayerNorm, convnext.LayerNorm2d):  # type: ignore[misc]
    """torchvision's LayerNorm of images."""


class RazorSqueezeExcitation(Gate, misc.SqueezeExcitation):  # type: ignore[misc]
    """torchvision's squeeze-and-excitation."""

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        channels: int = module.fc1.in_channels  # type: ignore[assignment, union-attr]
        return channels

    def gate_of(self, x: Tensor) -> Tensor:
        gate: Tensor = self._scale(x)
        return gate


SWAPS: dict[type[nn.Module], type[RazorLayer]] = {
    razor.__bases__[-1]: razor for razor in (RazorLayerNorm2d, RazorSqueezeExcitation)
}
BRANCHES: dict[type[nn.Module], tuple[tuple[str, ...], ...]] = {}  # see timm for some
PRE_NORM: dict[type[nn.Module], tuple[tuple[str, ...], ...]] = {}
LINEAR_FIRST = frozenset[type[nn.Module]]()
