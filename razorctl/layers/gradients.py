"""Gradients handed on in int8, from the operation that makes one to the layer that multiplies it.

The int8 GEMMs of a linear layer want the gradient of its output in int8. The backward pass of what
comes after the layer can make that in the operation that makes the gradient itself:

linear -- y -- GELU            GELU's backward pass makes the gradient of y, and its int8 copy
linear -- f -- x + f -- norm   the norm's makes the gradient of x + f, with a copy for f
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from razorctl.ops.kernels import fused


class Int8(NamedTuple):
    """What `ops.int8.int8_rows` makes of a gradient."""

    codes: Tensor
    scale: Tensor
    total: Tensor


class Gradients:
    """Which gradient is wanted in int8, and the last one that was made so.

    Both are asked for at once, in the forward pass by the layer after, in the backward pass by the
    layer before. They are known by the identity of a tensor, so a tensor that autograd or a hook
    has put in its place has none.
    """

    def __init__(self) -> None:
        self._wanted: tuple[weakref.ref[Tensor], torch.dtype] | None = None
        self._made: tuple[weakref.ref[Tensor], int, Tensor, Int8] | None = None

    def want(self, x: Tensor, dtype: torch.dtype) -> None:
        """Asks for an int8 copy of the gradient of `x`, and for that gradient in `dtype`.

        Only where one kernel makes them all; a compiler arranges that itself.
        """
        if fused(x.device) and not torch.compiler.is_compiling():
            self._wanted = weakref.ref(x), dtype

    def wanted(self, x: Tensor) -> torch.dtype | None:
        """The dtype of the last `want`, if it was of `x`."""
        if torch.compiler.is_compiling() or self._wanted is None or self._wanted[0]() is not x:
            return None
        return self._wanted[1]

    def offer(self, dx: Tensor, narrow: Tensor, int8: Int8) -> None:
        """Hands on a gradient: in the dtype that was wanted, and in int8 [rows, columns]."""
        self._made = weakref.ref(dx), dx._version, narrow, int8

    def take(self, dx: Tensor) -> tuple[Tensor, Int8] | None:
        """What was offered last, if it was of `dx`."""
        made, self._made = self._made, None
        if made is None or made[0]() is not dx or made[1] != dx._version:
            return None
        return made[2:]

    def __reduce__(self) -> tuple[Any, ...]:
        return Gradients, ()  # copies and pickles start empty


class AddFunction(torch.autograd.Function):
    """x + f for a residual connection."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: Tensor, gradients: Gradients) -> Tensor:
        ctx.dtype, ctx.gradients = f.dtype, gradients
        return x + f

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        made = ctx.gradients.take(dy)
        if made is None:
            return dy, dy.to(ctx.dtype), None
        narrow, int8 = made
        ctx.gradients.offer(narrow, narrow, int8)
        return dy, narrow, None


def add(x: Tensor, f: Tensor, gradients: Gradients) -> Tensor:
    """x + f; if the layer that made f wants its gradient in int8, whoever makes that of x + f can
    hand it on.
    """
    dtype = gradients.wanted(f) if x.shape == f.shape else None
    if dtype is None or x.dtype != torch.promote_types(x.dtype, dtype):
        return x + f
    y: Tensor = AddFunction.apply(x, f, gradients)
    gradients.want(y, dtype)
    return y
