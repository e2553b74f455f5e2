"""Activation functions that save their input by a rule: GELU, SiLU; and ReLU, exactly, by its sign.

The papers keep activation inputs dense in half precision (rule `half`): gelu'(0) is 1/2, so a
pruned element would not be left out but get a wrong derivative.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from razorctl.layers.autocast import to_compute_dtype
from razorctl.layers.base import RazorLayer, flat
from razorctl.ops.topk import pack_bits, unpack_bits
from razorctl.rules.base import Kept, Rule
from razorctl.rules.quantized import Through
from razorctl.spans import packing


class ActivationFunction(torch.autograd.Function):
    """y = f(x), dx = f'(x') dy, with x' what the rule restores; f is the stock forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "Activation", *kept: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(*kept)
        y = layer.stock(x)
        if y is x:  # an in-place function
            ctx.mark_dirty(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        return ctx.layer.gradient(dy, kept), None, *[None] * len(kept)


class Activation(RazorLayer):
    """Base of razor activations.

    function: its name in `ops.activation.FUNCTIONS`.
    """

    kind: ClassVar[str] = "activation"
    function: str

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return rule.elementwise

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if args else next(iter(kwargs.values()))
        if not (self.saving and x.requires_grad):
            return self.stock(x)
        with packing(), torch.no_grad():
            kept = self.keep(x.detach())
        y: Tensor = ActivationFunction.apply(x, self, *kept)
        self.offer(y, kept)
        return y

    def offer(self, y: Tensor, kept: Kept) -> None:
        """What tells x tells y = f(x) too, which the linear layers that it feeds can take."""
        if self.memo is not None and self.rule.lends(kept):
            dtype = to_compute_dtype(y.detach()[:0]).dtype
            if dtype == y.dtype:
                self.memo.offer(y, ("linear", dtype), Through(self.function, self.rule), kept)

    def stock(self, x: Tensor) -> Tensor:
        """The stock class's own forward."""
        y: Tensor = super().forward(x)
        return y

    def keep(self, x: Tensor) -> Kept:
        """What is saved of the input."""
        # A rule may keep the very tensor that the function is about to overwrite.
        x = flat(x.clone() if getattr(self, "inplace", False) else x)
        return self.rule.of_function(self.function).keep(x)

    def gradient(self, dy: Tensor, kept: Kept) -> Tensor:
        """dx from dy and what was kept."""
        rule = self.rule.of_function(self.function)
        return rule.function_grad(self.function, flat(dy), kept).view(dy.shape)


class ExactGELU(Activation):
    """x Phi(x)."""

    function = "gelu"


class TanhGELU(Activation):
    """The tanh approximation of GELU."""

    function = "gelu-tanh"


class QuickGELU(Activation):
    """x sigmoid(1.702 x)."""

    function = "quick-gelu"


class SiLU(Activation):
    """x sigmoid(x)."""

    function = "silu"


class ReLU(Activation):
    """max(x, 0): one bit per element is all its derivative needs, whatever the rule."""

    def offer(self, y: Tensor, kept: Kept) -> None:
        pass  # but y needs more

    def keep(self, x: Tensor) -> Kept:
        return (pack_bits((x > 0).reshape(-1)),)

    def gradient(self, dy: Tensor, kept: Kept) -> Tensor:
        return torch.where(unpack_bits(kept[0], dy.numel()).view(dy.shape), dy, 0)


class RazorGELU(Activation, nn.GELU):
    """nn.GELU, exact or tanh, that saves its input by `rule`."""

    @property
    def function(self) -> str:  # type: ignore[override]
        return "gelu" if self.approximate == "none" else "gelu-tanh"


class RazorSiLU(SiLU, nn.SiLU):
    """nn.SiLU that saves its input by `rule`."""


class RazorReLU(ReLU, nn.ReLU):
    """nn.ReLU that saves one bit per element."""


SWAPS = {nn.GELU: RazorGELU, nn.SiLU: RazorSiLU, nn.ReLU: RazorReLU}
