"""What layers hand on to each other: gradients in int8, and statistics of a residual stream.

The int8 GEMMs of a linear layer want the gradient of its output in int8. The backward pass of what
comes after the layer makes that in the operation that makes the gradient itself:

linear -- y -- GELU            GELU's backward pass makes the gradient of y in int8
linear -- y -- q, k, v         so does that of attention
linear -- f -- x + f -- norm   the norm's makes the gradient of x + f, and its int8 copy for f

In the forward pass the operation that adds x + f finds what the norm after it needs of its rows.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map_only

from razorctl.ops.kernels import fused
from razorctl.ops.norm import residual_add


class Int8(NamedTuple):
    """What `ops.int8.int8_rows` makes of a gradient."""

    codes: Tensor
    scale: Tensor
    total: Tensor


class Int8Gradient(Tensor):
    """A gradient [..., columns] of which there is only the int8 copy.

    Autograd hands it from the layer that makes it to the linear layer that wants it. Any other
    operation, as in a hook or where autograd adds gradients, finds scale * code in its place.

    int8: None once it was changed in place; `changed` has its values then.
    """

    int8: Int8 | None
    changed: Tensor | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, shape: torch.Size, dtype: torch.dtype, int8: Int8) -> "Int8Gradient":
        device = int8.codes.device
        made: Int8Gradient = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.int8, made.changed = int8, None
        return made

    def values(self) -> Tensor:
        if self.int8 is None:
            assert self.changed is not None
            return self.changed
        return (self.int8.codes * self.int8.scale).to(self.dtype).view(self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func._schema.is_mutable:
            for own in (t for t in tree_leaves((args, kwargs)) if isinstance(t, cls)):
                own.changed, own.int8 = own.values(), None
        args, kwargs = tree_map_only(cls, cls.values, (args, kwargs or {}))
        return func(*args, **kwargs)


class Statistics(NamedTuple):
    """The mean and 1 / std of the rows of x + f, as `ops.norm.residual_add` returns them.

    eps, centers: the settings of the norm that they are for. int8: whether an int8 copy of the
    gradient of x + f is wanted.
    """

    eps: float
    centers: bool
    mean: Tensor
    rstd: Tensor
    int8: bool


class Handover:
    """Which gradient is wanted in int8, the last int8 copy that was made, and the last statistics.

    Each is asked for at once, in the forward pass by the layer after, in the backward pass by the
    layer before. They are known by the identity of a tensor, so a tensor that autograd or a hook
    has put in its place has none.
    """

    def __init__(self) -> None:
        self._known: tuple[weakref.ref[Tensor], int, Statistics] | None = None
        self._wanted: weakref.ref[Tensor] | None = None
        self._made: tuple[weakref.ref[Tensor], int, Int8] | None = None

    def want(self, x: Tensor) -> None:
        """Asks for the gradient of `x` in int8.

        Only where one kernel makes it; a compiler arranges that itself.
        """
        if fused(x.device) and not torch.compiler.is_compiling():
            self._wanted = weakref.ref(x)

    def wanted(self, x: Tensor) -> bool:
        """Whether the last `want` was of `x`."""
        compiling = torch.compiler.is_compiling()
        return not compiling and self._wanted is not None and self._wanted() is x

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

    def offer(self, dx: Tensor, int8: Int8) -> None:
        """Hands on the int8 copy of a gradient."""
        self._made = weakref.ref(dx), dx._version, int8

    def take(self, dx: Tensor) -> Int8 | None:
        """The copy that was offered last, if it was of `dx`."""
        made, self._made = self._made, None
        if made is None or made[0]() is not dx or made[1] != dx._version:
            return None
        return made[2]

    def __reduce__(self) -> tuple[Any, ...]:
        return Handover, ()  # copies and pickles start empty


class AddFunction(torch.autograd.Function):
    """x + f for a residual connection, and the statistics of its rows."""

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


def add(x: Tensor, f: Tensor, handover: Handover, eps: float, centers: bool) -> Tensor:
    """x + f, where the norm that follows has that `eps` and `centers`."""
    like = x.shape == f.shape and x.dtype == torch.promote_types(x.dtype, f.dtype)
    if not (like and fused(x.device)) or torch.compiler.is_compiling():
        return x + f
    y, mean, rstd = AddFunction.apply(x, f, handover, eps, centers)
    handover.note(y, Statistics(eps, centers, mean, rstd, handover.wanted(f)))
    return y  # type: ignore[no-any-return]
