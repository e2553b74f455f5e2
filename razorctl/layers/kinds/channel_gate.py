"""Gates of channels: y = x g, with one g per channel, for the batch or for each image.

A g for the batch is a learned layer scale. A g per image is the gate of squeeze-and-excitation.
Only the gradient of g needs x. A norm or activation function may offer a copy of it; otherwise x is
packed by a rule. g is small, and stored as it is.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from razorctl.layers.base import RazorLayer, save, saved
from razorctl.layers.once_differentiable import once_differentiable
from razorctl.layers.shared_copies import layouts
from razorctl.layers.shared_copies.memo import copy_of_images
from razorctl.ops.images import memory_format
from razorctl.rules.base import Rule
from razorctl.rules.packed import Packed
from razorctl.system.spans import packing


class GateFunction(torch.autograd.Function):
    """dx = dy g, exact; dg = dy x', summed to the shape of g, with x' the packed values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, packed: Packed | None) -> Tensor:
        ctx.dtypes, ctx.shape = (x.dtype, gate.dtype), gate.shape
        save(ctx, gate if ctx.needs_input_grad[0] else None, packed)
        return x * gate

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, packed = saved(ctx)
        dx = dgate = None
        if ctx.needs_input_grad[0]:
            dx = (dy * gate).to(ctx.dtypes[0])
        if packed is not None:
            x = packed.images(dy.shape, packed.dtype, memory_format(dy))
            dgate = (dy * x).sum_to_size(ctx.shape).to(ctx.dtypes[1])
        return dx, dgate, None


class Gate(RazorLayer):
    """Base of razor modules that multiply images by a factor per channel."""

    kind: ClassVar[str] = "scale"

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return rule.elementwise

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """x * gate; x: [batch, channels, height, width], gate: [batch or 1, channels, 1, 1]."""
        copy = None
        if gate.requires_grad:
            with packing(), torch.no_grad():
                copy = self._copy(x)
        y: Tensor = GateFunction.apply(x, gate, copy)
        return y

    def _copy(self, x: Tensor) -> Packed:
        """The copy of `x` that another layer offers, or one by this layer's rule."""
        copy = None if self.memo is None else self.memo.find(x, layouts.of_channels(x), self)
        if copy is not None and copy.elementwise:
            return copy
        return copy_of_images(x.detach(), self.rules)


class Excitation(Gate):
    """Base of razor squeeze-and-excitation: x times `gate_of(x)`."""

    def gate_of(self, x: Tensor) -> Tensor:
        """The stock gate, [batch, channels, 1, 1]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        if self.saving and x.dim() == 4:
            return self.gated(x, self.gate_of(x))
        return self.stock(x)
