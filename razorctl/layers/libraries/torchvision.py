"""torchvision's own layers."""

from collections.abc import Callable

from torch import Tensor, nn
from torchvision.models import convnext, vision_transformer
from torchvision.ops import misc

from razorctl.layers.base import Swaps
from razorctl.layers.kinds.channel_gate import Excitation, Gate


class SqueezeExcitation(Excitation):
    """torchvision's squeeze-and-excitation."""

    _scale: Callable[[Tensor], Tensor]

    def gate_of(self, x: Tensor) -> Tensor:
        return self._scale(x)


class CNBlock(Gate):
    """torchvision's block of ConvNeXt, which applies its layer scale itself."""

    block: Callable[[Tensor], Tensor]
    stochastic_depth: Callable[[Tensor], Tensor]
    layer_scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        if not self.saving:
            return self.stock(input)
        y = self.gated(self.block(input), self.layer_scale.unsqueeze(0))
        y = self.stochastic_depth(y)
        y += input
        return y


SWAPS: Swaps = {
    convnext.CNBlock: CNBlock,
    misc.SqueezeExcitation: SqueezeExcitation,
}
# See `by_type`.
PRE_NORM: dict[type[nn.Module], tuple[tuple[str, ...], ...]] = {
    vision_transformer.EncoderBlock: (("ln_1", "self_attention", "dropout"), ("ln_2", "mlp")),
}
LINEAR_FIRST = frozenset[type[nn.Module]]({vision_transformer.MLPBlock})
