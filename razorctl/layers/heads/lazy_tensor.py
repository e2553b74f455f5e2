"""Tensors that are computed when something needs their values, and the layers that return them.

A lazy tensor holds what its values are computed from. `LAZY` of its class lists functions that do
not need the values. All others get the stock values, which are computed once.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from razorctl.errors import UsageError
from razorctl.layers.autocast import no_autocast
from razorctl.layers.base import RazorLayer, save, saved
from razorctl.layers.fsdp import alone
from razorctl.layers.heads.tied_embeddings import handed
from razorctl.layers.once_differentiable import once_differentiable

# Functions that need no values.
FACTS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim")),
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf")),
        *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "itemsize")),
        *(getattr(Tensor, name).__get__ for name in ("is_sparse", "is_nested", "is_quantized")),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, torch.numel),
        *(Tensor.is_floating_point, torch.is_floating_point, Tensor.element_size, Tensor.__len__),
        Tensor.untyped_storage,  # of no bytes, for hooks that count the outputs of modules
        *(Tensor.is_complex, torch.is_complex, Tensor.is_contiguous, Tensor.__hash__),
    }
)


class ValuesFunction(torch.autograd.Function):
    """The computed values of a lazy tensor, as a separate tensor in the graph."""

    @staticmethod
    def forward(ctx: Any, lazy: "Lazy") -> Tensor:
        assert lazy.computed is not None
        return lazy.computed.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class Lazy(Tensor):
    """A tensor that is not computed yet.

    Attributes:
        LAZY: function -> its version for lazy arguments, which returns None if it needs values.
        FACTS: functions that never need values.
        function: the autograd function that returns this tensor, of `parts`, `options` and a dtype.
        losses: see `CrossEntropyFunction`.
        axes: of the logits that `cross_entropy` takes; axis 1 is the classes.
        parts: the tensors that the values are computed from.
        options: what else they are computed from.
        check: raises UsageError if the parts have changed.
        make: computes the values.
        computed: the values, else None. Once computed they serve every operation, since they may be
            changed in place.
        origin: the autograd node that created this tensor.
        reached: the node at which the graph of `computed` was attached; an in-place autograd
            function replaces it.
        version: the version counter of `computed` when it was created.
    """

    LAZY: ClassVar[dict[Any, Callable[..., Tensor | None]]]
    FACTS: ClassVar[frozenset[Any]] = FACTS
    function: ClassVar[Any]
    losses: ClassVar[Callable[..., tuple[Tensor, ...]]]
    axes: ClassVar[int]
    parts: tuple[Any, ...]
    options: tuple[Any, ...]
    check: Callable[[], None]
    make: Callable[[], Tensor]
    computed: Tensor | None
    origin: Any = None
    reached: Any = None
    version: int

    @staticmethod
    def __new__(cls, shape: Any, dtype: torch.dtype, device: torch.device) -> Self:
        lazy: Self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, storage_size=0
        )
        lazy.computed = None
        return lazy

    @classmethod
    def of(
        cls,
        parts: tuple[Tensor | None, ...],
        options: tuple[Any, ...],
        dtype: torch.dtype,
        check: Callable[[], None],
        make: Callable[[], Tensor],
    ) -> Self:
        """A lazy tensor in `dtype`; the other arguments become attributes."""
        lazy: Self = cls.function.apply(*parts, *options, dtype)
        lazy.parts, lazy.options, lazy.check, lazy.make = parts, options, check, make
        lazy.origin = lazy.grad_fn
        return lazy

    def child(
        self, parts: tuple[Tensor | None, ...], dtype: torch.dtype, make: Callable[[], Tensor]
    ) -> Self:
        """A lazy tensor of the same class with other parts."""
        return self.of(parts, self.options, dtype, self.check, make)

    @property
    def pending(self) -> bool:
        """Whether `LAZY` still applies: no values yet, and no autograd function has returned it."""
        return self.computed is None and self.node is self.origin

    @property
    def node(self) -> Any:
        """The `grad_fn` of this tensor, not of its values."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn

    def values(self) -> Tensor:
        """The stock values; in the graph if gradients are enabled."""
        if self.computed is None:
            self.check()
            with torch.no_grad():
                self.computed = self.make()
            self.version = self.computed._version
        if torch.is_grad_enabled() and self.requires_grad and self.reached is not self.node:
            self.computed, self.reached = ValuesFunction.apply(self), self.node
        assert self.computed is not None
        return self.computed

    def first_values(self) -> Tensor:
        """The values, for another lazy tensor; raises UsageError if they have changed since."""
        values = self.values()
        check_versions((values, self.version))
        return values

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            first = next((arg for arg in args if isinstance(arg, Lazy)), None)
            if first is not None and func in first.FACTS:
                return func(*args, **kwargs)
            lazy = None if first is None else first.LAZY.get(func)
            if lazy is not None and args[0] is first and first.pending:
                output = lazy(func, *args, **kwargs)
                if output is not None:
                    return output
            first = args[0] if args and isinstance(args[0], Lazy) else None
            args, kwargs = tree_map_only(Lazy, _values, (args, kwargs))
        output = func(*args, **kwargs)
        in_place = first is not None and output is args[0]
        return first if in_place else output

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Lazy, _values, (args, kwargs or {}))
        return func(*args, **kwargs)


def _values(lazy: Lazy) -> Tensor:
    return lazy.values()


_FLOATS = {Tensor.float: torch.float32, Tensor.double: torch.float64}


def _cast(func: Any, lazy: Lazy, *args: Any, **kwargs: Any) -> Lazy | None:
    """The lazy tensor in a dtype that holds its values exactly, on the same device; else None."""
    options = (*args, *kwargs.values())
    dtypes = [option for option in options if isinstance(option, torch.dtype)]
    if func in _FLOATS:
        dtypes.append(_FLOATS[func])
    places = [option for option in options if isinstance(option, torch.device)]
    if not all(isinstance(o, (torch.dtype, torch.device, bool, type(None))) for o in options):
        return None
    if any(torch.empty(0, device=place).device != lazy.device for place in places):
        return None
    dtype = dtypes[0] if dtypes else lazy.dtype
    if torch.promote_types(dtype, lazy.dtype) != dtype:
        return None
    if dtype == lazy.dtype and not kwargs.get("copy"):
        return lazy
    return lazy.child(lazy.parts, dtype, lambda: lazy.first_values().to(dtype))


def _detached(func: Any, lazy: Lazy) -> Lazy:
    parts = tuple(None if t is None else t.detach() for t in lazy.parts)
    return lazy.child(parts, lazy.dtype, lambda: lazy.first_values().detach())


class CrossEntropyFunction(torch.autograd.Function):
    """Cross-entropies times a factor, or their sum with its gradients from the same pass.

    The gradient of a weight, the second part, then exists before the backward pass. The stock
    gradient is as large, so it does not count as saved bytes.

    Args:
        losses_of: (parts, target, factor, needed) -> the losses, and the gradients of the sum of
            factor * loss with respect to the parts; only the needed ones are read.
        total: whether to return the sum.
        factor: in the shape of the target; None for 1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        losses_of: Callable[..., tuple[Tensor, ...]],
        total: bool,
        target: Tensor,
        factor: Tensor | None,
        *parts: Any,
    ) -> Tensor:
        ctx.losses_of, ctx.total = losses_of, total
        needed = [total and need for need in ctx.needs_input_grad[4:]]
        with no_autocast(target.device):
            losses, *gradients = losses_of(parts, target, factor, needed)
        losses = losses if factor is None else losses * factor
        if not total:
            save(ctx, target, factor, *parts)
            return losses
        kept = [t if need else None for t, need in zip(gradients, needed, strict=True)]
        ctx.weight_grad = [kept.pop(1)] if kept[1:] else []
        ctx.weight = weakref.ref(parts[1]) if parts[1:] else None
        save(ctx, *kept)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.total:
            gradients = [None if t is None else t * dy for t in saved(ctx)]
            for dw in ctx.weight_grad:
                if dw is not None and torch._C._autograd._get_current_graph_task_keep_graph():
                    dw = dw * dy
                elif dw is not None:
                    ctx.weight_grad, dw = [None], handed(ctx.weight(), dw.mul_(dy))
                gradients.insert(1, dw)
            return None, None, None, None, *gradients
        needed = ctx.needs_input_grad[4:]
        target, factor, *parts = saved(ctx)
        with no_autocast(dy.device):
            dy = dy if factor is None else dy * factor
            _, *gradients = ctx.losses_of(parts, target, dy, needed)
        kept = (t if need else None for t, need in zip(gradients, needed, strict=True))
        return None, None, None, None, *kept


def _cross_entropy(
    func: Any,
    logits: Lazy,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`F.cross_entropy` with class indices; smoothed or weighted by class, not both."""
    plain = (weight is None or not label_smoothing) and size_average is None and reduce is None
    rows = target.dtype == torch.int64 and logits.dim() == logits.axes
    rows = rows and target.shape == (logits.shape[0], *logits.shape[2:])
    if not (plain and rows and reduction in ("none", "sum", "mean")):
        return None
    logits.check()
    taken = target != ignore_index
    factor = None if weight is None else weight[torch.where(taken, target, 0)] * taken
    losses_of = partial(logits.losses, (*logits.options, ignore_index, label_smoothing))
    loss: Tensor = CrossEntropyFunction.apply(
        losses_of, reduction != "none", target, factor, *logits.parts
    )
    if reduction == "mean":
        loss = loss / (taken if factor is None else factor).sum()
    autocast = torch.is_autocast_enabled(logits.device.type)  # under it losses keep their dtype
    return loss if autocast else loss.to(logits.dtype)


# For `LAZY` of any lazy tensor.
COMMON: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((*_FLOATS, Tensor.to, Tensor.type), _cast),
    Tensor.detach: _detached,
    F.cross_entropy: _cross_entropy,
}


def check_versions(*versions: tuple[Tensor, int]) -> None:
    """Raises UsageError if the version counter of a tensor differs from the one beside it."""
    if any(tensor._version != version for tensor, version in versions):
        raise UsageError(
            "an optimizer step or an in-place operation changed the inputs of logits before their "
            "first use; read the logits before that."
        )


class LazyLayer(RazorLayer):
    """Base of razor heads, which may return a lazy tensor.

    lazy: whether to return one even if nothing is stored for backward; see `lazily`.
    """

    kind: ClassVar[str] = "head"
    lazy: bool = False

    @property
    def defers(self) -> bool:
        """Whether this forward pass may return a lazy tensor."""
        keeps = self.lazy or self.saving
        return keeps and not torch.compiler.is_compiling() and not alone(self)


@contextmanager
def lazily(model: nn.Module) -> Iterator[None]:
    """A context in which heads return lazy tensors even in evaluation."""
    heads = [module for module in model.modules() if isinstance(module, LazyLayer)]
    for head in heads:
        head.lazy = True
    try:
        yield
    finally:
        for head in heads:
            del head.lazy
