"""Gates of channels, as in squeeze-and-excitation: y = x g, with a g for each channel of an image.

The gradient of g alone needs x, which is saved by a rule; a copy that a norm or an activation
function offers serves it. g is small, and saved as it is.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from razorctl.layers.base import RazorLayer, save, saved
from razorctl.layers.images import layout, pixels, unrolled
from razorctl.layers.sharing import Copy, copy_of
from razorctl.rules.base import Rule
from razorctl.spans import packing


class GateFunction(torch.autograd.Function):
    """dx = dy g, exact; dg = the sum of dy x' over an image, with x' what the rule unpacks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, copy: Copy | None) -> Tensor:
        ctx.rule, packed = copy or (None, None)
        ctx.dtype = x.dtype
        save(ctx, gate if ctx.needs_input_grad[0] else None, packed)
        return x * gate

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, packed = saved(ctx)
        dx = dgate = None
        if ctx.needs_input_grad[0]:
            dx = (dy * gate).to(ctx.dtype)
        if packed is not None:
            x = unrolled(ctx.rule.unpack(packed), dy.shape)
            dgate = (dy * x).sum(tuple(range(2, dy.dim())), keepdim=True)
        return dx, dgate, None


class Gate(RazorLayer):
    """Base of razor squeeze-and-excitation, which multiplies x by the `gate_of` x."""

    kind: ClassVar[str] = "scale"

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return rule.elementwise

    def gate_of(self, x: Tensor) -> Tensor:
        """The gate that the stock class computes, [batch, channels, 1, 1]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        if not (self.saving and x.dim() == 4):
            y: Tensor = super().forward(x)
            return y
        gate, copy = self.gate_of(x), None
        if gate.requires_grad:
            with packing(), torch.no_grad():
                copy = self.pack(x)
        y = GateFunction.apply(x, gate, copy)
        return y

    def pack(self, x: Tensor) -> Copy:
        """The copy of `x`, one that is known already if there is one."""
        if self.memo is None:
            return copy_of(pixels(x.detach()), self.rules)
        known = self.memo.find(x, layout(x))
        if known is not None and known.rule.elementwise:
            return known
        return copy_of(pixels(x.detach()), self.rules)


SWAPS: dict[type[nn.Module], type[RazorLayer]] = {}  # torch has none; see timm and torchvision
