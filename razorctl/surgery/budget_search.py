"""The search for a way to meet a byte budget: rules of fewer bits, and recomputed blocks."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from razorctl.config.recipe import Recipe
from razorctl.layers.base import stock_type
from razorctl.layers.by_type import razor_of
from razorctl.layers.heads.outputs import Outputs
from razorctl.layers.recompute.replayed_state import HALF
from razorctl.layers.shared_copies.memo import Memo
from razorctl.memory.fake import copies, mode_of
from razorctl.memory.saved import bytes_by_module, storages_by_module
from razorctl.methods import METHODS
from razorctl.registry import starred
from razorctl.rules.allocation import Names, allocate, close_ratios, closest, kinds_of, largest
from razorctl.surgery import outputs, reruns
from razorctl.surgery.rerun_choice import Reach, TracedBlocks, groups, unfit
from razorctl.surgery.sparsify import restore, swap

TIGHTER = 0.97  # factor of the bytes from one try to the next
PEAK = 2.0  # times the budget: the most that may be stored or held, with blocks of any size
# The ways to recompute blocks, in the order in which they are tried: the bits of copies of their
# inputs (None for the inputs as they are), and the modules that may be blocks.
RERUNS: tuple[tuple[int | None, Reach], ...] = (
    *product((None, HALF, 8), (Reach.LISTED, Reach.SMALL)),
    *product((None, HALF, 8), (Reach.ALL,)),
    *product((6, 4), Reach),
)


@dataclass(frozen=True)
class Tightened(Recipe):
    """A recipe whose convolutions get the rules of ratio `convolution`, if that is less."""

    convolution: float = 1.0

    @property
    def allocated(self) -> Mapping[str, Names]:
        return allocate(self.ratio, min(self.ratio, self.convolution))


class Reruns(NamedTuple):
    """A recipe for the rules, or None if no way meets the budget, and the blocks to recompute.

    bits: of the copies of their inputs; None stores the inputs as they are. refusal: a sentence
    about a block that cannot be recomputed.
    """

    recipe: Recipe | None
    bits: int | None = None
    names: tuple[str, ...] = ()
    refusal: str = ""

    def attach(self, model: nn.Module) -> None:
        memo = Memo()
        for name in self.names:
            reruns.attach(model.get_submodule(name), name, self.bits, memo)

    def stars(self) -> str:
        """The names as text; names that differ only in numbers are one, as "3 x blocks.*"."""
        stars = Counter(map(starred, self.names))
        return ", ".join(f"{count} x {name}" for name, count in stars.items())


class BudgetSearch:
    """The search for a way to meet a recipe's byte budget, on a copy of a model.

    The copy is left as the last try changed it.

    Args:
        twin: the copy, fake or real.
        inputs, run: of its step.
        recipe: its activation checkpointing is ignored.
        known: its output layers; None traces them.
    """

    budget: float  # in bytes
    close: float  # the largest ratio with close rules
    convolution: float  # the largest ratio for rules of convolutions

    def __init__(
        self,
        twin: nn.Module,
        inputs: Any,
        recipe: Recipe,
        run: Mapping[str, Any],
        known: Outputs | None = None,
    ) -> None:
        self.twin, self.inputs, self.run = twin, inputs, run
        self.recipe = replace(recipe, activation_checkpointing=False)
        dtypes = (run.get("autocast"), *(p.dtype for p in twin.parameters()))
        dtype = next(filter(None, dtypes), torch.float32)
        width = "wide" if dtype.itemsize > 2 else "narrow"
        close = METHODS[recipe.method].close_up_to("attention", width)
        self.width, self.close = width, close
        self.convolution = closest("convolution", width) if _convolves(twin) else largest()
        if recipe.activation_checkpointing:  # cannot be combined with recomputed blocks
            self.close = self.convolution = largest()
        # A choice by values, such as of experts, may be different at the values of copies, and so
        # may the shapes of saved tensors.
        self.real = mode_of(twin.parameters()) is None
        if known is None:
            with self._unchanged():
                known = outputs.traced(twin, inputs, **run)
        self.known = known
        exact = outputs.guess(twin, self.known)
        self.exact = Outputs(exact, every=True)  # as if final: the search runs no first pass
        self._traced: list[tuple[Mapping[str, Any], TracedBlocks]] = []
        self._met: list[tuple[Reruns, dict[str, int]]] = []

    def put(self, again: Reruns) -> None:
        """Sparsifies the copy."""
        restore(self.twin)
        swap(self.twin, again.recipe or self.recipe, some=False, known=self.exact)
        again.attach(self.twin)

    def at(self, ratio: float) -> Recipe:
        """The recipe with the rules of this ratio."""
        fields = vars(replace(self.recipe, ratio=ratio))
        return Tightened(**fields, convolution=self.convolution)

    def traced(self, ratio: float) -> TracedBlocks:
        """The traced step with the rules of a ratio; ratios with equal rules share it."""
        recipe = self.at(ratio)
        for before, traced in self._traced:
            if before == recipe.rules:
                return traced
        self.put(Reruns(recipe))
        with self._unchanged():
            traced = TracedBlocks(self.twin, self.inputs, self.run)
        self._traced.append((recipe.rules, traced))
        return traced

    def parts(self) -> dict[str, int]:
        """Module name -> the bytes that it stores now."""
        with self._unchanged():
            return bytes_by_module(storages_by_module(self.twin, self.inputs, **self.run))

    def parts_of(self, again: Reruns) -> dict[str, int] | None:
        """`parts` as a way was traced; None if a step of the model itself may store others."""
        if self.real or not self.known.every:
            return None
        rules = None if again.names or again.recipe is None else again.recipe.rules
        traced = (bytes_by_module(each.storages) for of, each in self._traced if of == rules)
        return next((parts for way, parts in self._met if way == again), next(traced, None))

    def _unchanged(self) -> AbstractContextManager[Any]:
        """A context for tracing a step; it protects a real copy of a model from changes."""
        return copies(self.twin, (), {}) if self.real else nullcontext()

    def is_close(self, again: Reruns) -> bool:
        """Whether the rules and copies of a way have enough bits for a close gradient."""
        recipe, up_to = again.recipe, METHODS[self.recipe.method].close_up_to
        assert isinstance(recipe, Tightened)
        convolution = min(recipe.ratio, recipe.convolution) if _convolves(self.twin) else 0.0
        few = again.bits is not None and again.bits < 8
        near = convolution <= closest("convolution", self.width)
        return not few and near and recipe.ratio <= up_to("attention", self.width)

    def way(self) -> Reruns:
        """The way to meet the budget: by close rules if possible, else by recomputing blocks.

        If both fail, by rules of fewer bits and by both together, first for convolutions only.
        """
        ratio = self.recipe.ratio
        near, far = max(ratio, self.close), max(ratio, largest())
        both = dict.fromkeys((ratio, near))
        stages = [(near, self.convolution, both), (far, far, dict.fromkeys((far,)))]
        if self.convolution < ratio:
            stages.insert(1, (near, near, both))
        for most, convolution, ratios in stages:
            self.convolution = convolution
            of_rules = self.ratio(most)
            again = self.reruns(ratios) if of_rules is None else Reruns(self.at(of_rules))
            if again.recipe is not None:
                break
        return self._more_bits(again) if self.convolution < ratio else again

    def _more_bits(self, again: Reruns) -> Reruns:
        """The way with the closest rules of convolutions that still meet the budget."""
        recipe = again.recipe
        assert recipe is not None
        ratio, ratios = recipe.ratio, close_ratios("convolution", self.width)

        def fits(convolution: float) -> bool:
            self.convolution = convolution
            kept, peak = self.traced(ratio).kept_and_peak(again.names, again.bits)
            return kept <= self.budget and (peak <= PEAK * self.budget or convolution == ratios[-1])

        self.convolution = ratios[bisect_left(ratios, True, hi=len(ratios) - 1, key=fits)]
        more = again._replace(recipe=self.at(ratio))
        return more if self.meets(more) else again

    def ratio(self, most: float) -> float | None:
        """The smallest ratio up to `most` whose rules meet the budget; None if there is none."""
        ratio = self.recipe.ratio
        loosest = self.traced(ratio)
        if loosest.kept() <= self.budget:
            return ratio
        # Stock modules store the same under all rules, unless attention is recomputed under some.
        stays = loosest.stock > self.budget and self.at(ratio).runs_again
        if ratio >= most or stays or not self._meets(most):
            return None
        steps = math.ceil(math.log((1 - most) / (1 - ratio), TIGHTER))
        return self._loosest([1 - (1 - ratio) * TIGHTER**step for step in range(steps)] + [most])

    def _loosest(self, ratios: list[float]) -> float:
        """The first of these ratios that meets the budget; the first of all is known not to."""
        low, high, probes = 0, len(ratios) - 1, count(1)
        while high - low > 1:
            # The stored bytes are about linear in 1 - ratio.
            over, under = (self.traced(ratios[end]).kept() - self.budget for end in (low, high))
            aim = ratios[low] + over / (over - under) * (ratios[high] - ratios[low])
            middle = (low + high) // 2 if next(probes) % 3 == 0 else bisect_left(ratios, aim)
            middle = min(max(middle, low + 1), high - 1)
            low, high = (low, middle) if self._meets(ratios[middle]) else (middle, high)
        return ratios[high]

    def _meets(self, ratio: float) -> bool:
        return self.traced(ratio).kept() <= self.budget

    def meets(self, again: Reruns) -> bool:
        """Whether a step stores at most the budget."""
        self.put(again)
        self._met.append((again, parts := self.parts()))
        return sum(parts.values()) <= self.budget

    def reruns(self, ratios: Iterable[float]) -> Reruns:
        """The blocks to recompute to meet the budget, as few as suffice.

        For each ratio's rules, elements of lists are tried first, then any module. If nothing meets
        the budget, the copy is left with the way that stores least under the last ratio's rules.
        """
        refusal, least = "", Reruns(self.recipe)
        for ratio in ratios:
            traced = self.traced(ratio)
            fewest, least = traced.kept(), Reruns(self.at(ratio))
            for again in self._ways(traced, ratio):
                kept = traced.kept(again.names, again.bits)
                if kept <= self.budget:
                    for way in dict.fromkeys((self._needed(traced, again), again)):
                        if self.meets(way):
                            return way
                fewest, least = min((fewest, least), (kept, again), key=itemgetter(0))
            if name := unfit(traced.modules):
                kind = stock_type(self.twin.get_submodule(name)).__name__
                why = f"gets an argument of type {traced.modules[name].unknown}"
                refusal = f"{name} ({kind}) {why}, so it cannot be recomputed"
        self.put(least)
        if least.names and not refusal:
            how = "whole" if least.bits is None else f"in {least.bits} bits"
            refusal = f"{least.stars()} would be recomputed, with inputs stored {how}"
        return Reruns(None, refusal=refusal)

    def _needed(self, traced: TracedBlocks, again: Reruns) -> Reruns:
        """The way without the blocks that save least, while the rest still meets the budget."""
        for name in sorted(again.names, key=partial(traced.spared, bits=again.bits)):
            rest = again._replace(names=tuple(other for other in again.names if other != name))
            if traced.kept(rest.names, again.bits) <= self.budget:
                again = rest
        return again

    def _ways(self, traced: TracedBlocks, ratio: float) -> Iterator[Reruns]:
        """The ways to recompute blocks, in the order in which they are tried."""
        last = ratio >= largest()
        for bits, reach in RERUNS:
            if self.real and bits is not None:
                continue
            names = tuple[str, ...]()
            for group in groups(traced, self.budget, reach, bits):
                names += tuple(group)
                _, peak = traced.kept_and_peak(names, bits)
                if reach is not Reach.ALL or last or peak <= PEAK * self.budget:
                    yield Reruns(self.at(ratio), bits, names)


def _convolves(model: nn.Module) -> bool:
    """Whether a stock model has layers that get rules of convolutions."""
    razors = ((module, razor_of(type(module))) for module in model.modules())
    kinds = kinds_of("convolution")
    return any(razor is not None and razor.rule_kind(module) in kinds for module, razor in razors)
