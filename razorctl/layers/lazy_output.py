"""Outputs of a layer that are computed where something needs them, and the layers that return them.

A lazy tensor knows what it is of, and which functions need less than its values: `LAZY` of its
class. Anything else finds the stock values, computed once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from razorctl.errors import UsageError
from razorctl.layers.base import RazorLayer

# What is known without the values.
FACTS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim")),
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_leaf")),
        *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "itemsize")),
        *(getattr(Tensor, name).__get__ for name in ("is_sparse", "is_nested", "is_quantized")),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, torch.numel),
        *(Tensor.is_floating_point, torch.is_floating_point, Tensor.element_size, Tensor.__len__),
        Tensor.untyped_storage,  # of no bytes, for whoever counts what modules return
        *(Tensor.is_complex, torch.is_complex, Tensor.is_contiguous, Tensor.__hash__),
    }
)


class ValuesFunction(torch.autograd.Function):
    """The values of a lazy tensor that are known, as a tensor of its own."""

    @staticmethod
    def forward(ctx: Any, lazy: "Lazy") -> Tensor:
        assert lazy.known is not None
        return lazy.known.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class Lazy(Tensor):
    """A tensor that is not computed yet.

    parts: what it is of. check: raises UsageError if these have changed. make: computes the values.
    known: what it returned. Once the values are known they are what every operation gets, as they
    may have been changed in place. origin: the node of the graph that it was made by. reached: the
    one that the graph of `known` goes on to, which an autograd function in place replaces. version:
    that of `known` when it was made.

    LAZY: a function -> what it does with lazy arguments, None where it needs the values. FACTS:
    functions that need no values, ever.
    """

    LAZY: ClassVar[dict[Any, Callable[..., Tensor | None]]]
    FACTS: ClassVar[frozenset[Any]] = FACTS
    parts: tuple[Tensor | None, ...]
    check: Callable[[], None]
    make: Callable[[], Tensor]
    known: Tensor | None
    origin: Any = None
    reached: Any = None
    version: int

    @staticmethod
    def __new__(cls, shape: Any, dtype: torch.dtype, device: torch.device) -> Self:
        made: Self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, storage_size=0
        )
        made.known = None
        return made

    def child(
        self, parts: tuple[Tensor | None, ...], dtype: torch.dtype, make: Callable[[], Tensor]
    ) -> Self:
        """What is of `parts` as this is of its own."""
        raise NotImplementedError

    @property
    def pending(self) -> bool:
        """Whether `LAZY` still holds; an autograd function that returns this takes its place."""
        return self.known is None and self.node is self.origin

    @property
    def node(self) -> Any:
        """Its own `grad_fn`, where a subclass gives that of its values."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn

    def values(self) -> Tensor:
        """The stock values, as part of the graph where that is recorded."""
        if self.known is None:
            self.check()
            with torch.no_grad():
                self.known = self.make()
            self.version = self.known._version
        if torch.is_grad_enabled() and self.requires_grad and self.reached is not self.node:
            self.known, self.reached = ValuesFunction.apply(self), self.node
        assert self.known is not None
        return self.known

    def first_values(self) -> Tensor:
        """The values, for another lazy tensor; raises UsageError if they were changed since."""
        values = self.values()
        unchanged((values, self.version))
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
                found = lazy(func, *args, **kwargs)
                if found is not None:
                    return found
            first = args[0] if args and isinstance(args[0], Lazy) else None
            args, kwargs = tree_map_only(Lazy, _values, (args, kwargs))
        found = func(*args, **kwargs)
        return first if first is not None and found is args[0] else found  # in place

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
    """The same values in a dtype that holds them exactly, on the same device."""
    options = (*args, *kwargs.values())
    dtypes = [option for option in options if isinstance(option, torch.dtype)]
    if func in _FLOATS:
        dtypes.append(_FLOATS[func])
    known = (torch.dtype, torch.device, bool, type(None))
    places = [option for option in options if isinstance(option, torch.device)]
    if not all(isinstance(option, known) for option in options):
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


# What any lazy tensor may have in `LAZY`.
COMMON: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((*_FLOATS, Tensor.to, Tensor.type), _cast),
    Tensor.detach: _detached,
}


def unchanged(*known: tuple[Tensor, int]) -> None:
    """Raises UsageError if a tensor has another version than it had."""
    if any(tensor._version != version for tensor, version in known):
        raise UsageError(
            "logits were first read after an optimizer step or an operation in place changed what "
            "they are of; read them before it."
        )


class LazyLayer(RazorLayer):
    """The head of a model, which may return a lazy tensor.

    lazy: whether passes that keep nothing return one too; see `lazily`.
    """

    kind: ClassVar[str] = "head"
    lazy: bool = False

    @property
    def defers(self) -> bool:
        """Whether this forward pass may return a lazy tensor."""
        return (self.lazy or self.saving) and not torch.compiler.is_compiling()


@contextmanager
def lazily(model: nn.Module) -> Iterator[None]:
    """Inside it, heads compute nothing before it is needed, even in evaluation."""
    found = [module for module in model.modules() if isinstance(module, LazyLayer)]
    for head in found:
        head.lazy = True
    try:
        yield
    finally:
        for head in found:
            del head.lazy
