"""The handover between layers: gradients in int8, and statistics of a residual stream.

The int8 GEMMs of a linear layer need the gradient of its output in int8. The next layer's backward
pass computes this gradient, and writes the int8 copy in the same operation:

linear -- y -- GELU            GELU computes the gradient of y in int8
linear -- y -- q, k, v         attention computes the gradient of y in int8
linear -- f -- x + f -- norm   the norm computes the gradient of x + f, and an int8 copy for f

In the forward pass, the operation that adds x + f computes the row statistics for the next norm.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from razorctl.layers.once_differentiable import once_differentiable
from razorctl.ops.kernels import fused
from razorctl.ops.norm import residual_add


class Int8(NamedTuple):
    """An int8 copy of the rows of a tensor, as `ops.int8.int8_rows` returns it."""

    codes: Tensor
    scale: Tensor
    total: Tensor
    largest: Tensor


class HeldGradient(Tensor):
    """A gradient that exists only in another form, for the node that reads this form.

    Any other operation, such as a hook or an accumulation of gradients, gets its values.

    form: None after an in-place change; then `changed` has the values.
    """

    form: Any
    changed: Tensor | None
    make: Callable[[], Tensor]  # computes the values from the form
    __torch_function__ = nn.Parameter.__torch_function__

    @staticmethod
    def __new__(
        cls, shape: torch.Size, dtype: torch.dtype, form: Any, make: Any, device: torch.device
    ) -> "HeldGradient":
        gradient: HeldGradient = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, storage_size=0
        )
        gradient.form, gradient.changed, gradient.make = form, None, make
        return gradient

    def values(self) -> Tensor:
        return self.make().view(self.shape) if self.changed is None else self.changed

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.cat.default and (whole := _joined(args[0])) is not None:
            return whole
        if func._schema.is_mutable:
            for gradient in (t for t in tree_leaves((args, kwargs)) if isinstance(t, HeldGradient)):
                gradient.changed, gradient.form = gradient.values(), None
        args, kwargs = tree_map_only(HeldGradient, HeldGradient.values, (args, kwargs or {}))
        return func(*args, **kwargs)


class Int8Gradient(HeldGradient):
    """A gradient [..., columns] as its int8 copy, for the linear layer that asked for it."""

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, int8: Int8) -> "Int8Gradient":
        def make() -> Tensor:
            return (int8.codes * int8.scale).to(dtype)

        held: Any = HeldGradient.__new__(cls, shape, dtype, int8, make, int8.codes.device)
        return held  # type: ignore[no-any-return]

    @property
    def int8(self) -> Int8 | None:
        int8: Int8 | None = self.form
        return int8


class OneHalf(NamedTuple):
    """The form of a half of the columns of a gradient; joining both halves returns the whole."""

    whole: Tensor
    number: int

    def values(self) -> Tensor:
        return self.whole.chunk(2, -1)[self.number].contiguous()


def _joined(parts: Sequence[Tensor]) -> Tensor | None:
    """The gradient whose halves, in order, these are; else None."""
    halves = [part.form for part in parts if isinstance(part, HeldGradient)]
    halves = [half for half in halves if isinstance(half, OneHalf)]
    whole = len(parts) == 2 and [half.number for half in halves] == [0, 1]
    return halves[0].whole if whole and halves[0].whole is halves[1].whole else None


class Statistics(NamedTuple):
    """The mean and 1 / std of the rows of x + f, as `ops.norm.residual_add` returns them.

    Args:
        eps, centers: the settings of the norm that will use them.
        mean, rstd: as `residual_add` returns them.
        int8: whether an int8 copy of the gradient of x + f is requested.
    """

    eps: float
    centers: bool
    mean: Tensor
    rstd: Tensor
    int8: bool


class Handover:
    """A request for a gradient in int8, the last int8 gradient, and the last statistics.

    The layer that runs next, forward or backward, takes each of them. Each belongs to one tensor
    object; a tensor that autograd or a hook has put in its place gets none.
    """

    def __init__(self) -> None:
        self._statistics: tuple[weakref.ref[Tensor], int, Statistics] | None = None
        self._wanted: weakref.ref[Tensor] | None = None
        self._int8: tuple[weakref.ref[Tensor], int, Int8] | None = None

    def want(self, x: Tensor) -> None:
        """Requests the gradient of `x` in int8, if one kernel can compute both.

        Not in a compiled program: the compiler fuses the two itself.
        """
        if fused(x.device) and not torch.compiler.is_compiling():
            self._wanted = weakref.ref(x)

    def wanted(self, x: Tensor) -> bool:
        """Whether the last request was for `x`."""
        compiling = torch.compiler.is_compiling()
        return not compiling and self._wanted is not None and self._wanted() is x

    def note(self, x: Tensor, statistics: Statistics) -> None:
        """Offers the statistics of the rows of `x`."""
        self._statistics = weakref.ref(x), x._version, statistics

    def statistics(self, x: Tensor, eps: float, centers: bool) -> Statistics | None:
        """The last statistics, if they belong to `x` and these settings."""
        if torch.compiler.is_compiling() or self._statistics is None:
            return None
        tensor, version, statistics = self._statistics
        same = tensor() is x and version == x._version
        wanted = statistics.eps == eps and statistics.centers == centers
        return statistics if same and wanted else None

    def offer(self, dx: Tensor, int8: Int8) -> None:
        """Offers the int8 copy of a gradient."""
        self._int8 = weakref.ref(dx), dx._version, int8

    def take(self, dx: Tensor) -> Int8 | None:
        """The last int8 copy, if it belongs to `dx`."""
        last, self._int8 = self._int8, None
        if last is None:
            return None
        tensor, version, int8 = last
        return int8 if tensor() is dx and version == dx._version else None

    def __reduce__(self) -> tuple[Any, ...]:
        return Handover, ()  # copies and pickles start empty


class ResidualFunction(torch.autograd.Function):
    """x + f of a residual connection, and the statistics of its rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, f: Tensor, handover: Handover, eps: float, centers: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.dtype, ctx.handover = f.dtype, handover
        y, mean, rstd = residual_add(x, f, eps, centers)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        return y, mean, rstd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *nothing: Any) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None, None
        int8 = ctx.handover.take(dy)
        df = dy.to(ctx.dtype) if int8 is None else Int8Gradient(dy.shape, ctx.dtype, int8)
        return dy, df, None, None, None


def add_residual(x: Tensor, f: Tensor, handover: Handover, eps: float, centers: bool) -> Tensor:
    """x + f, before a norm with these settings."""
    like = x.shape == f.shape and x.dtype == torch.promote_types(x.dtype, f.dtype)
    if not (like and fused(x.device)) or torch.compiler.is_compiling():
        return x + f
    y, mean, rstd = ResidualFunction.apply(x, f, handover, eps, centers)
    handover.note(y, Statistics(eps, centers, mean, rstd, handover.wanted(f)))
    return y  # type: ignore[no-any-return]
