"""Arguments and buffers of a module that runs a second time, in the backward pass."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

ROWS = 16  # an input of fewer rows is kept as it is
# So is an argument with one of these in its name: its values may be near -inf, or are few.
EXACT = ("mask", "bias", "weights")
# Arguments that hold no tensors.
PLAIN: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, slice, Enum, nn.Module),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format),
)
# The parts of a cache of an encoder and a decoder.
CACHES = ("self_attention_cache", "cross_attention_cache")
# The attributes that have the number of a block's part of a cache.
PLACES = ("layer_idx", "layer_id")
Buffer = tuple[nn.Module, str]


def unknown(leaves: Iterable[Any]) -> str:
    """The type of the first of these arguments that may hold tensors unseen, "" if none may."""
    strange = (
        leaf for leaf in leaves if not (isinstance(leaf, (Tensor, *PLAIN)) or callable(leaf))
    )
    return next((type(leaf).__name__ for leaf in strange), "")


def without_cache(block: nn.Module, value: Any) -> Any:
    """None for a cache of transformers that has nothing of a block yet; else the value."""
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None or not isinstance(value, caches.Cache):
        return value
    layers = (vars(module).get(name) for module in block.modules() for name in PLACES)
    index = next((index for index in layers if isinstance(index, int)), 0)
    parts = [value, *(vars(value).get(name) for name in CACHES)]
    present = [part.layers[index] for part in parts if len(getattr(part, "layers", ())) > index]
    held = tree_leaves([list(vars(layer).values()) for layer in present])
    return value if any(isinstance(leaf, Tensor) for leaf in held) else None


@cache
def names_of(kind: Any) -> tuple[str, ...]:
    """The names of the arguments of a class's forward."""
    return tuple(signature(kind.forward).parameters)[1:]


def watching_buffers(owner: nn.Module) -> Callable[[], list[Buffer]]:
    """Begins a first run of `owner`; returns what tells which buffers it has changed."""
    before = {key: (buffer, buffer._version) for key, buffer in _buffers(owner)}

    def changed() -> list[Buffer]:
        now = dict(_buffers(owner))
        return [
            key
            for key, (buffer, version) in before.items()
            # torch's batch norms count no version of the statistics that they change.
            if isinstance(key[0], nn.modules.batchnorm._NormBase)
            or now.get(key) is not buffer
            or buffer._version != version
        ]

    return changed


def _buffers(owner: nn.Module) -> Iterator[tuple[Buffer, Tensor]]:
    for module in owner.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield (module, name), buffer


@contextmanager
def unchanged(buffers: Sequence[Buffer]) -> Iterator[None]:
    """Runs the block with copies of buffers, such as the running statistics of a BatchNorm."""
    before = [module._buffers[name] for module, name in buffers]
    for (module, name), buffer in zip(buffers, before, strict=True):
        module._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for (module, name), buffer in zip(buffers, before, strict=True):
            module._buffers[name] = buffer


def laid(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x with those strides, by which operations choose what they do, and so what they keep."""
    shape = x.shape
    for axis, stride in enumerate(strides):
        x = x if stride else x.narrow(axis, 0, 1)
    y = x.new_empty_strided(x.shape, strides)
    if torch._debug_has_internal_overlap(y):
        return x.expand(shape)
    return y.copy_(x).expand(shape)
