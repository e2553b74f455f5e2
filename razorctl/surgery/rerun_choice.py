"""The choice of blocks to recompute, so that a model stores few enough bytes."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from razorctl import registry
from razorctl.layers.base import RazorLayer
from razorctl.layers.recompute.replayed_state import Rows, unknown
from razorctl.layers.shared_copies.memo import Memo, TensorCache
from razorctl.memory.fake_mode import storage_key
from razorctl.memory.saved import resident_keys, storages_by_module
from razorctl.surgery import reruns


class Reach(Enum):
    """The modules that may be blocks: only elements of lists and sequences, more, or any."""

    LISTED, SMALL, ALL = range(3)


class Input(NamedTuple):
    """A tensor argument of a module.

    number: the same for modules that share its copy. rows: the rows that it is packed in, or None.
    key, size: of its storage. wanted: whether it requires a gradient or is packed.
    """

    number: int
    rows: Rows | None
    key: int
    size: int
    wanted: bool

    def bytes(self, bits: int | None) -> int:
        """Bytes of a copy with so many bits, or of the tensor itself if it is stored as it is."""
        return self.size if bits is None or self.rows is None else self.rows.bytes(bits)


@dataclass
class Module:
    """A module that may be recomputed.

    held: the bytes that only it and its submodules store. own: the bytes that its own code stores.
    calls: how often it ran. unknown: the type of an argument that prevents a recomputation.
    """

    held: int = 0
    own: int = 0
    calls: int = 0
    inputs: list[Input] = field(default_factory=list)
    unknown: str = ""


class TracedBlocks:
    """A traced step of a sparsified model: the bytes stored now, or if blocks were recomputed.

    stock: the bytes that stock modules store.

    Args:
        twin: a copy of a model, fake or real; the trace changes a real one.
        inputs, run: of its step, as in `storages_by_module`.
    """

    def __init__(self, twin: nn.Module, inputs: Any, run: Mapping[str, Any]) -> None:
        self.modules = {name: Module() for name, _ in twin.named_modules()}
        self._resident = resident_keys(twin)
        self._numbers, self._count, memo = TensorCache[int](), count(), Memo()
        hooks, self._alive = list[RemovableHandle](), list[torch.UntypedStorage]()
        for name, module in twin.named_modules():
            note = partial(self._note, reruns.Rerun(module, name, None, memo))
            hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
        try:
            self.storages = storages_by_module(twin, inputs, **run)
        finally:
            for hook in hooks:
                hook.remove()
            del self._alive  # until here, so that no storage key was used twice
        self._places = {storage.key: storage.places for storage in self.storages}
        self._sizes = Counter[tuple[str, ...]]()
        for storage in self.storages:
            self._sizes[tuple(dict.fromkeys(storage.places))] += storage.size
        razor = {
            name
            for name, module in twin.named_modules()
            if isinstance(module, RazorLayer) and not module.partial
        }
        self.stock = sum(size for at, size in self._sizes.items() if not razor.issuperset(at))
        for places, size in self._sizes.items():
            for outer in set(_outer(places[0])).intersection(*map(_outer, places)):
                self.modules[outer].held += size
            if len(places) == 1:
                self.modules[places[0]].own += size

    def _note(self, rerun: reruns.Rerun, block: nn.Module, args: Any, kwargs: Any) -> None:
        """Records the arguments of a call of a module."""
        module, arguments = self.modules[rerun.name], rerun.arguments(args, kwargs)
        module.calls += 1
        module.unknown = module.unknown or unknown(tree_leaves(arguments))
        for x, rows in rerun.leaves(arguments):
            strided = isinstance(x, Tensor) and x.layout is torch.strided
            if not strided or storage_key(x) in self._resident:
                continue
            images = rows is not None and rows.images
            number = self._numbers.get(x, images, block)
            if number is None:
                number = next(self._count)
                self._numbers.put(x, images, number, block)
            storage = x.untyped_storage()
            self._alive.append(storage)
            wanted = x.requires_grad or rows is not None
            new = Input(number, rows, storage_key(x), storage.nbytes(), wanted)
            module.inputs.append(new)

    def kept(self, names: Sequence[str] = (), bits: int | None = None) -> int:
        """The bytes stored if the named modules are recomputed from copies of so many bits.

        None of them is inside another. bits: None stores their inputs as they are.
        """
        again = set(names)

        @cache
        def covered(place: str) -> bool:
            return not again.isdisjoint(_outer(place))

        def gone(places: tuple[str, ...]) -> bool:
            return all(map(covered, places))

        copies, whole = dict[int, int](), dict[int, int]()
        for name in names:
            for x in self.modules[name].inputs:
                if bits is not None and x.rows is not None:
                    copies[x.number] = x.bytes(bits)
                elif gone(self._places.get(x.key, ())):
                    whole[x.key] = x.size
        stays = sum(size for places, size in self._sizes.items() if not gone(places))
        return stays + sum(copies.values()) + sum(whole.values())

    def kept_and_peak(self, names: Sequence[str], bits: int | None) -> tuple[int, int]:
        """The bytes of `kept`, and the same plus what the largest block holds while recomputed."""
        kept = self.kept(names, bits)
        return kept, kept + max((self.modules[name].held for name in names), default=0)

    def spared(self, name: str, bits: int | None) -> int:
        """About the bytes that recomputing a module saves."""
        module = self.modules[name]
        sizes = {x.number: x.bytes(bits) for x in module.inputs if x.wanted}
        return module.held - sum(sizes.values())


@cache
def _outer(name: str) -> tuple[str, ...]:
    """The name of a module, followed by the names of all modules around it."""
    return (name, *_outer(name.rpartition(".")[0])) if name else ("",)


def groups(traced: TracedBlocks, budget: float, reach: Reach, bits: int | None) -> list[list[str]]:
    """The blocks to recompute, in groups whose names differ only in numbers.

    Blocks are not inside each other. Of all such choices, this one exceeds the budget least; among
    equal ones it has the least peak: the stored bytes plus what the largest block holds while it is
    recomputed. Groups that save most come first.

    Args:
        traced: the model.
        budget: in bytes.
        reach: as in `_fit`.
        bits: of copies of their inputs, as in `TracedBlocks.kept`.
    """
    modules, inside = traced.modules, _inside(traced)
    fit = _fit(traced, budget, reach, bits)
    largest = Counter[str]()  # by group, so that its blocks are chosen together
    for name in fit:
        stars = registry.starred(name)
        largest[stars] = max(largest[stars], modules[name].held)

    def chosen(name: str, most: int) -> Iterator[str]:
        if name in fit and largest[registry.starred(name)] <= most:
            yield name
        else:
            for child in inside.get(name, ()):
                yield from chosen(child, most)

    def excess_and_peak(names: list[str]) -> tuple[float, int]:
        kept, peak = traced.kept_and_peak(names, bits)
        return max(0, kept - budget), peak

    ways = (list(chosen("", most)) for most in sorted(set(largest.values())))
    best = min(ways, key=excess_and_peak, default=[])
    by_stars: dict[str, list[str]] = {}
    for name in best:
        by_stars.setdefault(registry.starred(name), []).append(name)
    return sorted(by_stars.values(), key=lambda names: traced.kept(names, bits))


def _inside(traced: TracedBlocks) -> dict[str, list[str]]:
    """Module name -> the names of its children, if it has any."""
    inside: dict[str, list[str]] = {}
    for name in filter(None, traced.modules):
        inside.setdefault(name.rpartition(".")[0], []).append(name)
    return inside


def _fit(traced: TracedBlocks, budget: float, reach: Reach, bits: int | None) -> dict[str, None]:
    """The names of modules that may be blocks, in the order of the model.

    With LISTED they are elements of lists. With SMALL a module may also be one if it holds no more
    than the budget, if its own code stores most of what it holds, or if it contains no elements,
    unless it has children and is most of the model. With ALL any module but the model itself may.
    """
    modules, inside = traced.modules, _inside(traced)

    def able(name: str) -> bool:
        module = modules[name]
        return bool(module.calls and not module.unknown and traced.spared(name, few) > 0)

    # Bytes that two blocks share count for neither, though recomputing both saves them: 8 bits.
    few = bits and min(bits, 8)
    names = list(filter(able, modules))
    elements = {name for name in names if name.rpartition(".")[2].isdigit()}
    # Modules around elements are almost the model, and would save nothing at its peak.
    above = {outer for name in elements for outer in _outer(name.rpartition(".")[0])}

    def fits(name: str) -> bool:
        held = modules[name].held
        if name and (reach is Reach.ALL or held <= budget or 2 * modules[name].own > held):
            return True
        whole = name in inside and 2 * held > modules[""].held
        return name not in above and not whole

    return dict.fromkeys(
        n for n in names if n in elements or (reach is not Reach.LISTED and fits(n))
    )


def unfit(modules: Mapping[str, Module]) -> str:
    """The name of the largest module that cannot be recomputed; "" if all can."""
    names = [name for name, module in modules.items() if name and module.unknown]
    return max(names, key=lambda name: modules[name].held, default="")
