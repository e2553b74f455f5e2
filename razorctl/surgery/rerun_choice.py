"""The choice of the blocks that run again, so that a model keeps few enough bytes."""

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
    """The modules that may be blocks: elements of lists and sequences alone, more, or any part."""

    LISTED, SMALL, ALL = range(3)


class Input(NamedTuple):
    """A tensor that a module gets.

    number: the same for modules that share its copy. rows: as it is packed, None if it is not. key,
    size: of its storage. wanted: whether it gets a gradient, or is packed.
    """

    number: int
    rows: Rows | None
    key: int
    size: int
    wanted: bool

    def bytes(self, bits: int | None) -> int:
        """Bytes of a copy in so many bits, or of itself if it is kept as it is."""
        return self.size if bits is None or self.rows is None else self.rows.bytes(bits)


@dataclass
class Module:
    """A module that may run again.

    held: the bytes that it keeps with all inside it, and that nothing else keeps. own: those that
    its own code keeps. calls: how often it ran. unknown: the type of an argument with which it
    cannot run again.
    """

    held: int = 0
    own: int = 0
    calls: int = 0
    inputs: list[Input] = field(default_factory=list)
    unknown: str = ""


class TracedBlocks:
    """A traced step of a sparsified model: what it keeps, and would keep if blocks ran again.

    stock: the bytes that stock modules keep.

    Args:
        twin: a copy of a model, fake or real; a real one does not stay as it is.
        inputs, run: of its step, as of `storages_by_module`.
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
            del self._alive  # so that no key was used again
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
        """Adds what a module is called with to what is known of it."""
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
            new = Input(number, rows, storage._cdata, storage.nbytes(), wanted)
            module.inputs.append(new)

    def kept(self, names: Sequence[str] = (), bits: int | None = None) -> int:
        """The bytes that are kept if the named modules run again, from copies of so many bits.

        None of them is inside another. bits: None keeps their inputs as they are.
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
        """The bytes of `kept`, and these with what the largest block holds as it runs again."""
        kept = self.kept(names, bits)
        return kept, kept + max((self.modules[name].held for name in names), default=0)

    def spared(self, name: str, bits: int | None) -> int:
        """About the bytes that are not kept if a module runs again."""
        module = self.modules[name]
        sizes = {x.number: x.bytes(bits) for x in module.inputs if x.wanted}
        return module.held - sum(sizes.values())


@cache
def _outer(name: str) -> tuple[str, ...]:
    """The name of a module and of all that it is inside of."""
    return (name, *_outer(name.rpartition(".")[0])) if name else ("",)


def groups(traced: TracedBlocks, budget: float, reach: Reach, bits: int | None) -> list[list[str]]:
    """The blocks that may run again, in groups whose names differ in numbers alone.

    Of the ways to choose blocks that are not inside each other, the one that keeps least above the
    budget, and of these the one of the least peak: what is kept, and what the largest block holds
    while it runs again. Groups that spare most are first.

    Args:
        traced: the model.
        budget: in bytes.
        reach: as of `_fit`.
        bits: of copies of their inputs, as of `TracedBlocks.kept`.
    """
    modules, inside = traced.modules, _inside(traced)
    fit = _fit(traced, budget, reach, bits)
    largest = Counter[str]()  # of a group, so that its blocks are chosen together
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
    """Module name -> the names of the modules right inside it, if there are any."""
    inside: dict[str, list[str]] = {}
    for name in filter(None, traced.modules):
        inside.setdefault(name.rpartition(".")[0], []).append(name)
    return inside


def _fit(traced: TracedBlocks, budget: float, reach: Reach, bits: int | None) -> dict[str, None]:
    """The names of modules that may be blocks, in the order of the model.

    With SMALL any module without elements of lists inside is one too, unless it has parts and is
    most of the model, and any that holds no more than the budget, or whose own code keeps most of
    what it holds. With ALL any is one but the model itself.
    """
    modules, inside = traced.modules, _inside(traced)

    def able(name: str) -> bool:
        module = modules[name]
        return bool(module.calls and not module.unknown and traced.spared(name, few) > 0)

    # What two blocks keep together, and would spare, is held by neither: 8 bits allow for it.
    few = bits and min(bits, 8)
    names = list(filter(able, modules))
    elements = {name for name in names if name.rpartition(".")[2].isdigit()}
    # What elements are inside of is the model, more or less, and would save nothing at its peak.
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
    """The name of the largest module that cannot run again, "" if all can."""
    names = [name for name, module in modules.items() if name and module.unknown]
    return max(names, key=lambda name: modules[name].held, default="")
