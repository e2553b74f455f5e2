"""What layers hand on to each other: gradients in int8, and statistics of a residual stream.

The int8 GEMMs of a linear layer want the gradient of its output in int8. The backward pass of what
comes after the layer can make that in the operation that makes the gradient itself:

linear -- y -- GELU            GELU's backward pass makes the gradient of y, and its int8 copy
linear -- f -- x + f -- norm   the norm's makes the gradient of x + f, with a copy for f

In the forward pass the operation that adds x + f finds what the norm after it needs of its rows.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from razorctl.ops.kernels import fused
from razorctl.ops.norm import residual_add


class Int8(NamedTuple):
    """What `ops.int8.int8_rows` makes of a gradient."""

    codes: Tensor
    scale: Tensor
    total: Tensor


class Statistics(NamedTuple):
    """The mean and 1 / std of rows, as `ops.norm.residual_add` returns them for these settings."""

    eps: float
    centers: bool
    mean: Tensor
    rstd: Tensor


class Gradients:
    """Which gradient is wanted in int8, and the last one that was made so; the last statistics.

    Each is asked for at once, in the forward pass by the layer after, in the backward pass by the
    layer before. They are known by the identity of a tensor, so a tensor that autograd or a hook
    has put in its place has none.
    """

    def __init__(self) -> None:
        self._known: tuple[weakref.ref[Tensor], int, Statistics] | None = None
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

    def note(self, x: Tensor, found: Statistics) -> None:
        """Makes statistics of the rows of `x` known."""
        self._known = weakref.ref(x), x._version, found

    def statistics(self, x: Tensor, eps: float, centers: bool) -> Statistics | None:
        """Those that were noted last, if they are of `x` and of these settings."""
        if torch.compiler.is_compiling() or self._known is None:
            return None
        known, version, found = self._known
        same = known() is x and version == x._version and found[:2] == (eps, centers)
        return found if same else None

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
    """x + f for a residual connection, and the statistics of its rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, f: Tensor, gradients: Gradients, eps: float, centers: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.dtype, ctx.gradients = f.dtype, gradients
        y, mean, rstd = residual_add(x, f, eps, centers)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        return y, mean, rstd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *nothing: Any) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None, None
        made = ctx.gradients.take(dy)
        if made is None:
            return dy, dy.to(ctx.dtype), None, None, None
        narrow, int8 = made
        ctx.gradients.offer(narrow, narrow, int8)
        return dy, narrow, None, None, None


def add(x: Tensor, f: Tensor, gradients: Gradients, eps: float, centers: bool) -> Tensor:
    """x + f, where the norm that follows has that `eps` and `centers`.

    If the layer that made f wants its gradient in int8, that of x + f is wanted so.
    """
    like = x.shape == f.shape and x.dtype == torch.promote_types(x.dtype, f.dtype)
    if not (like and fused(x.device)) or torch.compiler.is_compiling():
        return x + f
    dtype = gradients.wanted(f)
    y, mean, rstd = AddFunction.apply(x, f, gradients, eps, centers)
    gradients.note(y, Statistics(eps, centers, mean, rstd))
    if dtype is not None:
        gradients.want(y, dtype)
    return y  # type: ignore[no-any-return]
