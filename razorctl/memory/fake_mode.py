"""The mode of fake tensors in which steps are traced."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._mode_utils import no_dispatch

from razorctl.errors import UsageError

# Operations whose results depend on values, or that resize an argument.
_UNKNOWN = frozenset(
    (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
)
_CONSTANTS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))
_CONSTANTS |= {torch.layout, torch.memory_format}
_NORMS = frozenset(
    getattr(torch.ops.aten, f"native_{kind}_norm").default for kind in ("batch", "group", "layer")
)


def _half(values: Tensor) -> Tensor:
    """The places of entries that are not 0, if these are half of each row."""
    sizes = (*values.shape[:-1], values.shape[-1] // 2)
    return torch.stack(torch.meshgrid(*map(torch.arange, sizes), indexing="ij"), -1).flatten(0, -2)


_ANSWERS: dict[Any, Callable[[Tensor], Any]] = {
    torch.ops.aten._local_scalar_dense.default: lambda value: value.dtype == torch.bool or 1,
    torch.ops.aten.nonzero.default: _half,
}
_CLONE, _EQUAL = torch.ops.aten.clone.default, torch.ops.aten.equal.default
_FUSED_SGD = torch.ops.aten._fused_sgd_.default


class _Result(NamedTuple):
    """A tensor that an operation returned.

    source: the index of the tensor argument whose storage it shares; None for a new storage. same:
    whether it is that tensor itself.
    """

    source: int | None
    same: bool
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def make(self, mode: FakeTensorMode, sources: Sequence[FakeTensor]) -> FakeTensor:
        if self.source is None:
            with no_dispatch():
                meta = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
            return FakeTensor(mode, meta, self.device)
        source = sources[self.source]
        if self.same:
            return source
        with no_dispatch():
            meta = torch.empty((), dtype=self.dtype, device="meta")
            meta.set_(source.untyped_storage(), self.offset, self.shape, self.stride)
        return FakeTensor(mode, meta, self.device)


class TraceMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode that remembers the results of operations for arguments of the same sizes.

    FakeTensorMode does so too, but not for operations of other libraries. Its keys may contain
    symbols, and take longer to compute than most results.

    originals: the keys of the storages of parameters and buffers that fake ones replace. over:
    whether the trace has ended, so that its tensors must not meet real ones. answers: whether a
    question for a value has an answer: a condition holds, a number is 1, half of the entries of
    each row are not 0, and two tensors are equal if they are one, or copies of one. Matchers of
    objects ask so; other models would be traced wrongly.
    """

    # Operation and arguments -> the type of the list of results (None for a single one), results.
    _known: ClassVar[dict[Any, tuple[Any, list[_Result | None]]]] = {}
    originals: frozenset[int] = frozenset()
    over = answers = False

    def __init__(self) -> None:
        super().__init__()
        self.cache_enabled = False  # the keys of torch's own cache took a fifth of a trace
        # Storage of a copy -> a reference, so that its key is not reused, and the copied place.
        self._copies: dict[int, tuple[StorageWeakRef, tuple[int, int]]] = {}

    def dispatch(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if self.over:
            raise UsageError(
                "code of the model has cached a tensor of a trace, which has no values; empty that "
                "cache, and run the model once before razorctl traces it."
            )
        if self.answers and func in _ANSWERS:
            return _ANSWERS[func](*args)
        if self.answers and func is _EQUAL:
            return self._place(args[0]) == self._place(args[1])
        kwargs, sources = kwargs or {}, list[FakeTensor]()
        if self.answers and func is _CLONE:
            copy: Any = super().dispatch(func, types, args, kwargs)
            reference = StorageWeakRef(copy.untyped_storage())  # type: ignore[no-untyped-call]
            self._copies[reference.cdata] = reference, self._place(args[0])
            return copy
        key = self._key(func, args, kwargs, sources)
        if key in self._known:
            kind, results = self._known[key]
            made = [result and result.make(self, sources) for result in results]
            return made[0] if kind is None else kind(made)
        if func is _FUSED_SGD:  # changes its arguments, and torch cannot trace it
            return None
        returned: Any = super().dispatch(func, types, args, kwargs)
        if func in _NORMS:
            returned = _with_wide_statistics(returned, args)
        if key is not None and key == self._key(func, args, kwargs, []):
            kind = next((t for t in (list, tuple) if isinstance(returned, t)), None)
            learned = _results([returned] if kind is None else returned, sources)
            if learned is not None:
                self._known[key] = kind, learned
        return returned

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        """The storage of a tensor, or of what it is a copy of, and where it begins there."""
        key = storage_key(tensor)
        return self._copies[key][1] if key in self._copies else (key, int(tensor.storage_offset()))

    def _key(self, func: Any, args: Any, kwargs: Any, sources: list[FakeTensor]) -> Any:
        """The key of a call, None if results cannot be kept; adds its tensors to `sources`."""
        key = [func, torch.get_default_dtype()]
        values = (*args, *kwargs, *kwargs.values()) if kwargs else args
        if func.namespace == "prim" or not self._append(key, values, sources):
            return None
        if not (sources and _UNKNOWN.isdisjoint(func.tags)) or torch.is_inference_mode_enabled():
            return None
        return tuple(key)

    def _append(self, key: list[Any], values: Iterable[Any], sources: list[FakeTensor]) -> bool:
        """Appends arguments to a cache key; False if the key cannot describe one of them."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or not _plain(value):
                    return False
                key += _facts(value)
                sources.append(value)
            elif kind in _CONSTANTS:
                key += kind, value
            elif kind is list or kind is tuple:
                key += kind, len(value)
                if not self._append(key, value, sources):
                    return False
            else:
                return False
        return True


def _with_wide_statistics(returned: Any, args: Sequence[Any]) -> Any:
    """The results of a norm, with mean and deviation at least as wide as its parameters.

    Kernels return them so; fake ones on a CPU return them in the input's dtype.
    """
    y, *statistics = returned
    wide = next((t.dtype for t in args[1:] if isinstance(t, Tensor)), y.dtype)
    return y, *(t.to(torch.promote_types(t.dtype, wide)) for t in statistics)


def storage_key(tensor: Tensor) -> int:
    """The key of a tensor's storage, unique while it is alive."""
    key: int = StorageWeakRef(tensor.untyped_storage()).cdata  # type: ignore[no-untyped-call]
    return key


def _facts(tensor: FakeTensor) -> tuple[Any, ...]:
    shape, stride = tensor.shape, tensor.stride()
    return tensor.dtype, tensor.fake_device, shape, stride, tensor.storage_offset()


def _plain(tensor: FakeTensor) -> bool:
    """Whether `_facts` describe a tensor completely: strided, not conjugated or negated."""
    strided = tensor.constant is None and tensor.layout is torch.strided
    return strided and not tensor.is_conj() and not tensor.is_neg()


def _results(returned: Sequence[Any], sources: Sequence[FakeTensor]) -> list[_Result | None] | None:
    """Descriptions of the returned tensors; None if one cannot be described."""
    keys = [storage_key(source) for source in sources]
    results = list[_Result | None]()
    for tensor in returned:
        if tensor is None:
            results.append(None)
            continue
        if type(tensor) is not FakeTensor or not _plain(tensor) or tensor.requires_grad:
            return None
        key = storage_key(tensor)
        # If arguments share a storage, the result may be any of them.
        if keys.count(key) > 1 or (key not in keys and not _alone(tensor, returned)):
            return None
        source = keys.index(key) if key in keys else None
        same = source is not None and sources[source] is tensor
        results.append(_Result(source, same, *_facts(tensor)))
    return results


def _alone(tensor: Tensor, others: Sequence[Any]) -> bool:
    """Whether a tensor is the only one here with its storage, and fills it."""
    key = storage_key(tensor)
    tensors = (other for other in others if isinstance(other, Tensor))
    shared = sum(storage_key(other) == key for other in tensors) > 1
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    size = (1 + sum((n - 1) * step for n, step in steps)) * (tensor.numel() > 0)
    whole = tensor.untyped_storage().nbytes() == size * tensor.itemsize
    return bool(whole and not shared and not tensor.storage_offset())
