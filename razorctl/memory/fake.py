"""Fake copies of models: tensors with sizes and without values."""

import copy
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from razorctl.memory.fake_mode import TraceMode, storage_key

_CACHED = type(cache(len))  # of functions with an `lru_cache`
# What need not be copied, and what takes `copy.deepcopy` longest for its size.
_ATOMS = frozenset((bool, int, float, str, type(None)))
_CONTAINERS = frozenset((OrderedDict, dict, list, set))


def fake(
    model: nn.Module, mode: FakeTensorMode | None = None, device: torch.device | str = "cpu"
) -> FakeTensorMode:
    """Replaces a model's meta parameters and buffers by fake ones on `device`.

    Returns the mode of the fake tensors, a new one if `mode` is None.
    """
    mode = mode or TraceMode()
    new = _stand_ins(model, mode, device)
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = new[id(tensor)]
    return mode


def mode_of(tensors: Iterable[Tensor]) -> FakeTensorMode | None:
    """The mode of the fake tensors among these; None if none is fake."""
    return next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)


def _stand_ins(
    model: nn.Module, mode: FakeTensorMode, device: torch.device | str
) -> dict[int, Any]:
    """id of a parameter or buffer -> the fake one that replaces it, for most of them."""
    tensors = [*model.parameters(), *model.buffers()]
    users = Counter(storage_key(tensor) for tensor in tensors if _simple(tensor))
    # A mode copies a fake tensor to the same fake tensor while that is alive. Faking a real one by
    # the mode takes ten times as long.
    new: dict[int, Any] = {
        id(tensor): _fake_like(tensor, mode, device if tensor.is_meta else tensor.device)
        for tensor in tensors
        if tensor.is_meta
        or isinstance(tensor, FakeTensor)
        or (_simple(tensor) and users[storage_key(tensor)] == 1)
    }
    for tensor in tensors:  # code with its own reference to a real one gets the same fake one
        if id(tensor) in new and not (tensor.is_meta or isinstance(tensor, FakeTensor)):
            mode.fake_tensor_converter.set_tensor_memo(tensor, new[id(tensor)])
            if isinstance(mode, TraceMode):
                mode.originals |= {storage_key(tensor)}
    return new


def _simple(tensor: Tensor) -> bool:
    """Whether a tensor fills its storage, and is not a scalar that a model may read."""
    if type(tensor) not in (Tensor, nn.Parameter) or not tensor.dim():
        return False
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj():
        return False
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _fake_like(tensor: Tensor, mode: FakeTensorMode, device: torch.device | str) -> Tensor:
    """A fake tensor or parameter on `device` with the shape, strides and dtype of `tensor`."""
    with no_dispatch():  # the mode's own torch.empty_strided takes several times as long
        meta = torch.empty_strided(
            tensor.shape,
            tensor.stride(),
            dtype=tensor.dtype,
            device="meta",
            requires_grad=tensor.requires_grad,
        )
    new = FakeTensor(mode, meta, torch.device(device))
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def tensors_of(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The tensors among inputs, parameters and buffers."""
    leaves = [*tree_leaves(inputs), *model.parameters(), *model.buffers()]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@contextmanager
def fakes(model: nn.Module, inputs: Any) -> Iterator[tuple[FakeTensorMode, Any]]:
    """Makes a model a fake copy of itself, as `copies` does; yields a mode and fake inputs.

    Copies of meta tensors are on the device of the other tensors, or on the CPU if all are meta.
    """
    tensors = tensors_of(model, inputs)
    mode = mode_of(tensors) or TraceMode()
    device = next((t.device for t in tensors if not t.is_meta), torch.device("cpu"))
    memo = {id(t): _fake_like(t, mode, device) for t in tensors if t.is_meta}
    memo |= _stand_ins(model, mode, device)
    try:
        with copies(model, inputs, memo, mode) as batch:
            yield mode, batch
    finally:
        if isinstance(mode, TraceMode):
            mode.over = mode_of(tensors) is None


@contextmanager
def copies(
    model: nn.Module, inputs: Any, memo: dict[int, Any], mode: FakeTensorMode | None = None
) -> Iterator[Any]:
    """Makes a model a copy of itself, in train mode, inside the block; yields copies of the inputs.

    The module objects stay, since closures and containers may hold them. Everything in them is
    copied by `copy.deepcopy` with this memo (under a mode to fakes), and put back afterwards.
    Objects that cannot be copied, such as locks, are shared.
    """
    before = [(module, type(module), vars(module)) for module in model.modules()]
    memo |= {id(module): module for module, *_ in before}
    with FakeCopyMode(mode) if mode else nullcontext():
        new = [{name: _copy_of(x, memo) for name, x in state.items()} for *_, state in before]
        # Tokenizers return their own mapping type.
        batch = _copy_of(dict(inputs) if isinstance(inputs, Mapping) else inputs, memo)
    try:
        for (module, *_), state in zip(before, new, strict=True):
            state.pop("_compiled_call_impl", None)  # as torch copies modules
            object.__setattr__(module, "__dict__", state)
        model.train()
        yield batch
    finally:
        for module, kind, state in before:
            object.__setattr__(module, "__dict__", state)
            object.__setattr__(module, "__class__", kind)


def _copy_of(value: Any, memo: dict[int, Any]) -> Any:
    kind: Any = type(value)
    if kind in _ATOMS:
        return value
    if kind in _CONTAINERS and not value:  # most of a module's attributes, such as of hooks
        return memo.setdefault(id(value), kind())
    size = len(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # the classes inside may raise anything
        while len(memo) > size:  # entries of the failed copy are incomplete
            memo.popitem()
        return memo.setdefault(id(value), value)


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Inside the block, methods of transformers that cache tensors compute them each time.

    A cache would hand fake tensors to real passes, and real ones to fake passes. Compiled methods
    cache nothing, so transformers is told that they are compiled. Afterwards an `lru_cache` of the
    model's code that was filled inside is cleared, and its dictionaries and lists have their old
    contents.
    """
    module: Any = sys.modules.get("transformers.pytorch_utils", SimpleNamespace())
    before = vars(module).get("is_torchdynamo_compiling")
    every = _globals(model)
    caches = [value for value in every if isinstance(value, _CACHED)]
    misses = {cache: cache.cache_info().misses for cache in caches}
    held = [(value, value.copy()) for value in every if type(value) in (dict, list)]
    module.is_torchdynamo_compiling = lambda: True
    try:
        yield
    finally:
        module.is_torchdynamo_compiling = before
        for cache, count in misses.items():
            if cache.cache_info().misses > count:
                cache.cache_clear()
        for value, old in held:
            if len(value) != len(old):
                value.clear()
                (value.update if isinstance(value, dict) else value.extend)(old)


def _globals(model: nn.Module) -> list[Any]:
    """The values in the classes of a model and in the modules that define these."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    foreign = [k for k in kinds if k.__module__.partition(".")[0] not in ("razorctl", "torch")]
    scopes = {*foreign, *(sys.modules.get(kind.__module__) for kind in foreign)} - {None}
    return [value for scope in scopes for value in vars(scope).values()]


@contextmanager
def whole_rows(model: nn.Module) -> Iterator[None]:
    """Inside the block, a transformers decoder without mask and positions creates no mask.

    It would look whether its own mask hides nothing, and whether its own positions are of one text
    per row. Both are so, but fake tensors cannot tell.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None:
        yield
        return
    packed, skips, told = masks.find_packed_sequence_indices, masks._ignore_causal_mask_sdpa, False

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal told
        names = {name for name, value in kwargs.items() if value is not None}
        told = len(args) > 1 or any("mask" in name or name == "position_ids" for name in names)

    def indices(positions: Tensor) -> Tensor | None:
        sequences: Tensor | None = packed(positions) if told else None
        return sequences

    def ignore(mask: Tensor | None, *args: Any, **kwargs: Any) -> bool:
        ignored: bool = skips(mask if told else None, *args, **kwargs)
        return ignored

    reader: Any = getattr(model, "text_model", model)  # of two towers, which run without a root
    hook = reader.register_forward_pre_hook(note, with_kwargs=True)
    masks.find_packed_sequence_indices, masks._ignore_causal_mask_sdpa = indices, ignore
    try:
        yield
    finally:
        masks.find_packed_sequence_indices, masks._ignore_causal_mask_sdpa = packed, skips
        hook.remove()
