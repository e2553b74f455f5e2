"""nn.Dropout with a mask of one bit per element; stock stores a byte (CUDA) or four (CPU)."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from razorctl.layers.base import RazorLayer, Swaps
from razorctl.layers.once_differentiable import once_differentiable
from razorctl.ops.dropout import dropout, dropout_backward
from razorctl.ops.topk import pack_bits, unpack_bits
from razorctl.rules.base import Rule
from razorctl.rules.derived import DerivedByExample, DerivedDropout
from razorctl.system.spans import packing


class DropoutFunction(torch.autograd.Function):
    """y = x mask / (1 - p), and the mask in bits; the gradient is exact whatever the rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
        y, mask = dropout(x, p)
        ctx.p = p
        with packing():
            bits = pack_bits(mask.reshape(-1))
            ctx.save_for_backward(bits)
        ctx.mark_non_differentiable(bits)
        return y, bits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, nothing: Any) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        mask = unpack_bits(bits, dy.numel()).view(dy.shape)
        return dropout_backward(dy, mask, ctx.p), None


def dropped(layer: RazorLayer, x: Tensor, p: float) -> Tensor:
    """Dropout of x in the forward of a `saving` layer."""
    if p == 0:
        return x  # the same tensor, so that later layers find its copy
    if not x.requires_grad or p >= 1:
        return F.dropout(x, p)
    y: Tensor
    y, bits = DropoutFunction.apply(x, p)
    if layer.memo is not None:
        derived = layer.memo.derived((x,), layer)
        if derived:
            layer.memo.derive(y, DerivedDropout(y.shape, y.dtype, derived, (bits,), p=p))
    return y


class Dropout(RazorLayer):
    """Dropout that stores one bit per element."""

    kind: ClassVar[str] = "dropout"
    p: float

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        assert isinstance(module, nn.Dropout)
        return rule.elementwise and not module.inplace

    def forward(self, input: Tensor) -> Tensor:
        return dropped(self, input, self.p) if self.saving or self.p == 0 else self.stock(input)


class DropPath(RazorLayer):
    """Drop path; its output is recomputed from one factor per example."""

    kind: ClassVar[str] = "dropout"
    drop_prob: float

    def forward(self, x: Tensor) -> Tensor:
        derived = () if self.memo is None or not self.saving else self.memo.derived((x,), self)
        if self.memo is None or not derived or not 0 < self.drop_prob < 1:
            return self.stock(x)
        factor = self.stock(x.new_ones(len(x), *(1 for _ in x.shape[1:])))
        y = self.dropped(x, factor)
        self.memo.derive(y, DerivedByExample(y.shape, y.dtype, derived, (factor,)))
        return y

    def dropped(self, x: Tensor, factor: Tensor) -> Tensor:
        """The stock output, given the factor of each example [batch, 1, ...]."""
        return x * factor


SWAPS: Swaps = {nn.Dropout: Dropout}
