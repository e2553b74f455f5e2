"""Tensors that are computed when something needs their values, and the layers that return them.

A lazy tensor holds what its values are computed from. `LAZY` of its class lists functions that do
not need the values. All others get the stock values, which are computed once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from razorctl.errors import UsageError
from razorctl.layers.base import RazorLayer
from razorctl.layers.fsdp import alone

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
        parts: the tensors that the values are computed from.
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
    parts: tuple[Tensor | None, ...]
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

    def child(
        self, parts: tuple[Tensor | None, ...], dtype: torch.dtype, make: Callable[[], Tensor]
    ) -> Self:
        """A lazy tensor of the same class with other parts."""
        raise NotImplementedError

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


# For `LAZY` of any lazy tensor.
COMMON: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((*_FLOATS, Tensor.to, Tensor.type), _cast),
    Tensor.detach: _detached,
}


def check_versions(*versions: tuple[Tensor, int]) -> None:
    """Raises UsageError if the version counter of a tensor differs from the one beside it."""
    if any(tensor._version != version for tensor, version in versions):
        raise UsageError(
            "logits were first read after an optimizer step or an operation in place changed what "
            "they are of; read them before it."
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
