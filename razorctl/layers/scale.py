"""Layer scale: y = x gamma with a learned gamma per column, whose gradient alone needs x."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from razorctl.layers.autocast import no_autocast
from razorctl.layers.base import RazorLayer, flat, save, saved
from razorctl.layers.sharing import copy_of
from razorctl.rules.base import Rule
from razorctl.rules.derived import Derived, DerivedAffine
from razorctl.spans import packing


class ScaleFunction(torch.autograd.Function):
    """dx = dy gamma, exact; dgamma = sum over rows of dy x', with x' the packed values."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, layer: "LayerScale", derived: Derived | None
    ) -> Tensor:
        packed = None
        if ctx.needs_input_grad[1]:
            with packing():
                packed = copy_of(flat(x), layer.rules) if derived is None else derived
        save(ctx, gamma, packed)
        return layer.stock(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gamma, packed = saved(ctx)
        dx = dgamma = None
        with no_autocast(dy.device):
            if ctx.needs_input_grad[1]:
                dgamma = (flat(dy) * packed.values()).sum(0)
            if ctx.needs_input_grad[0]:
                dx = dy * gamma
        return dx, dgamma, None, None


class LayerScale(RazorLayer):
    """Base of razor layer scales. gamma_name: the attribute of the stock class that is gamma."""

    kind: ClassVar[str] = "scale"
    gamma_name: ClassVar[str] = "gamma"

    @classmethod
    def _gamma(cls, module: nn.Module) -> Tensor:
        gamma: Tensor = getattr(module, cls.gamma_name)
        return gamma

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        return cls._gamma(module).numel()

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return not getattr(module, "inplace", False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.saving:
            return self.stock(x)
        offered = () if self.memo is None else self.memo.derived((x,), self)
        takes = offered and self.rules.of(x.dtype).again
        gamma = self._gamma(self)
        y: Tensor = ScaleFunction.apply(x, gamma, self, offered[0].rows(x.dtype) if takes else None)
        if self.memo is not None and offered:
            scaled = DerivedAffine(x.shape, y.dtype, offered, (gamma.detach(), None))
            self.memo.derive(y, scaled)
        return y
