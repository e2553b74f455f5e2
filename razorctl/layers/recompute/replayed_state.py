"""The state that a recomputation replays: arguments, random numbers, autocast and buffers."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from inspect import signature
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from razorctl.errors import UsageError
from razorctl.layers.autocast import AVAILABLE
from razorctl.layers.base import changed_since
from razorctl.layers.fsdp import gather
from razorctl.layers.random_state import random_state
from razorctl.ops.quantize import empty_copy
from razorctl.ops.random import replaying
from razorctl.rules.packed import TILE

ROWS = 16  # inputs of fewer rows are stored as they are
# Arguments with one of these in the name are, too: values may be near -inf, or are few.
EXACT = ("mask", "bias", "weights")
# Arguments that hold no tensors.
PLAIN: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, slice, Enum, nn.Module),
    *(torch.dtype, torch.device, torch.Size, torch.memory_format),
)
# Attributes with the index of a block in a cache.
PLACES = ("layer_idx", "layer_id")
Buffer = tuple[nn.Module, str]
NOTHING = torch.empty(0, device="meta")
HALF = 16  # bits of an element in half precision
# Owners whose last first run has drawn no random numbers on a card. The capture of a CUDA graph
# cannot read the state of these, so only such owners are captured.
_quiet: WeakSet[nn.Module] = WeakSet()


def unknown(leaves: Iterable[Any]) -> str:
    """The type of the first argument that may hold tensors out of sight; "" if none may."""
    strange = (
        leaf for leaf in leaves if not (isinstance(leaf, (Tensor, *PLAIN)) or callable(leaf))
    )
    return next((type(leaf).__name__ for leaf in strange), "")


def without_cache(block: nn.Module, value: Any) -> Any:
    """None for a transformers cache that holds nothing of this block yet; else the value."""
    caches = sys.modules.get("transformers.cache_utils")
    if caches is None or not isinstance(value, caches.Cache):
        return value
    layers = (vars(module).get(name) for module in block.modules() for name in PLACES)
    index = next((index for index in layers if isinstance(index, int)), 0)
    parts = [value, *(part for part in vars(value).values() if isinstance(part, caches.Cache))]
    present = [part.layers[index] for part in parts if len(getattr(part, "layers", ())) > index]
    held = tree_leaves([list(vars(layer).values()) for layer in present])
    return value if any(isinstance(leaf, Tensor) for leaf in held) else None


def empty_cache(block: nn.Module, value: Any) -> Callable[[], Any] | None:
    """A function that makes an empty cache of the same type, for a cache without this block's data.

    None for any other value, also for a cache of linear attention, whose result depends on it.
    """
    caches: Any = sys.modules.get("transformers.cache_utils")
    if caches is None or without_cache(block, value) is not None:
        return None
    if type(value) is caches.EncoderDecoderCache:
        parts = [part for part in vars(value).values() if isinstance(part, caches.Cache)]
        makes = [empty_cache(block, part) for part in parts]
        known = [make for make in makes if make is not None]
        if len(known) == len(makes):
            return lambda: caches.EncoderDecoderCache(*(make() for make in known))
    states = any(hasattr(layer, "recurrent_states") for layer in getattr(value, "layers", ()))
    make: Callable[[], Any] = caches.DynamicCache
    return make if type(value) is make and not states else None


def by_position(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's positional arguments."""
    parameters = signature(forward).parameters.values()
    places = (p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    return tuple(p.name for p in places)


class Rows(NamedTuple):
    """The rows and columns that a tensor is packed in; images: whether the rows are pixels."""

    length: int
    columns: int
    images: bool

    def bytes(self, bits: int) -> int:
        """Bytes of a copy with this number of bits per element."""
        if bits == HALF:
            return 2 * self.length * self.columns
        return sum(t.nbytes for t in empty_copy(NOTHING, self.length, self.columns, bits, TILE))


def rows_of(x: Tensor, images: bool = False, first: bool = False) -> Rows | None:
    """The rows that a tensor is packed in; None unless it is an activation with enough of them.

    An activation requires a gradient, or is the first argument: a model's input to its first block.
    """
    columns = max(1, x.shape[1 if images else -1]) if x.dim() else 1
    activation = x.is_floating_point() and not isinstance(x, nn.Parameter)
    activation = activation and (x.requires_grad or first)
    if activation and x.layout is torch.strided and x.numel() >= ROWS * columns:
        return Rows(x.numel() // columns, columns, images)
    return None


def leaves_of(
    arguments: Mapping[Any, Any], names: Sequence[str], channels: Iterable[int] = ()
) -> Iterator[tuple[Any, Rows | None]]:
    """Each leaf of the arguments, with the rows that it is packed in, or None.

    Args:
        arguments: by number or name.
        names: the names of the numbered ones.
        channels: the possible numbers of channels, axis 1, of an image.
    """
    first = True
    for key, value in arguments.items():
        name = names[key] if isinstance(key, int) and key < len(names) else str(key)
        exact = any(part in name for part in EXACT)
        for x in tree_leaves(value):
            packs = isinstance(x, Tensor) and not exact
            images = packs and x.dim() > 2 and x.shape[1] in channels
            yield x, rows_of(x, images, first) if packs else None
            first = False


class Context:
    """The state that a run of a module reads beside its arguments, to be restored.

    Args:
        owner: the module, before it runs.
        name: its name and class, for messages.
        parts: the submodules that are not recomputed.
        tensors: the tensors among its arguments.
    """

    def __init__(
        self, owner: nn.Module, name: str, parts: Sequence[nn.Module], tensors: Sequence[Tensor]
    ) -> None:
        self.owner, self.name, self.parts = owner, name, parts
        self.given = [t for t in tensors if isinstance(t, nn.Parameter)]
        places = tuple(dict.fromkeys((torch.device("cpu"), *(t.device for t in tensors))))
        quiet = owner in _quiet and torch.cuda.is_current_stream_capturing()
        read = [device for device in places if device.type == "cpu" or not quiet]
        self.random = [(random_state(device), device) for device in read]
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys(device.type for device in places)
            if kind in AVAILABLE
        ]
        self._changed = watching_buffers(owner)

    def end(self) -> None:
        """Ends the first run: notes the versions of weights, changed buffers, and draws."""
        on_card = [each for each in self.random if each[1].type == "cuda"]
        if on_card:
            drawn = any(
                state.tolist() != random_state(device).tolist() for state, device in on_card
            )
            (_quiet.discard if drawn else _quiet.add)(self.owner)
        self.buffers = self._changed()
        del self._changed
        apart = {id(p) for part in self.parts for p in part.parameters()}
        weights = (p for p in (*self.owner.parameters(), *self.given) if id(p) not in apart)
        self.weights = [(p, p._version) for p in weights]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restores the state inside the block; raises UsageError if a weight has changed since."""
        for weight, version in self.weights:
            if weight._version != version:
                raise UsageError(changed_since(self.name))
            gather(self.owner, weight)
        with ExitStack() as stack:
            for state, device in self.random:
                stack.enter_context(replaying(state, device))
            for kind, dtype, on in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=on))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(unchanged(self.buffers))
            yield


def split(arguments: Mapping[Any, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Splits arguments by number or name into positional ones and keywords."""
    places = [value for key, value in arguments.items() if isinstance(key, int)]
    return places, {key: value for key, value in arguments.items() if isinstance(key, str)}


def watching_buffers(owner: nn.Module) -> Callable[[], list[Buffer]]:
    """Watches the first run of `owner`; the returned function lists the changed buffers."""
    before = {key: (buffer, buffer._version) for key, buffer in own_buffers(owner)}

    def changed() -> list[Buffer]:
        now = dict(own_buffers(owner))
        return [
            key
            for key, (buffer, version) in before.items()
            # torch's batch norms change their statistics without counting versions.
            if isinstance(key[0], nn.modules.batchnorm._NormBase)
            or now.get(key) is not buffer
            or buffer._version != version
        ]

    return changed


def own_buffers(owner: nn.Module) -> Iterator[tuple[Buffer, Tensor]]:
    """The buffers of a module and its submodules."""
    for module in owner.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield (module, name), buffer


@contextmanager
def unchanged(buffers: Sequence[Buffer]) -> Iterator[None]:
    """Runs the block with clones of buffers, such as a BatchNorm's running statistics."""
    before = [module._buffers[name] for module, name in buffers]
    for (module, name), buffer in zip(buffers, before, strict=True):
        module._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for (module, name), buffer in zip(buffers, before, strict=True):
            module._buffers[name] = buffer


def laid(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x with these strides. Operations choose by them what they compute and save."""
    shape = x.shape
    for axis, stride in enumerate(strides):
        x = x if stride else x.narrow(axis, 0, 1)
    y = x.new_empty_strided(x.shape, strides)
    dense = torch.ops.aten.is_non_overlapping_and_dense(y)
    return (y.copy_(x) if dense else x).expand(shape)
