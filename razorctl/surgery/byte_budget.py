"""The byte budget of `razor`: met for a model and its inputs, or compared with what it keeps."""

import logging
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from razorctl import units
from razorctl.config.registry import starred
from razorctl.errors import UsageError
from razorctl.layers.base import RazorLayer, stock_type
from razorctl.layers.sharing import Memo
from razorctl.memory.fake import mode_of
from razorctl.memory.saved import Forward, on_copies, traced_bytes, traced_bytes_by_module
from razorctl.recipe import Recipe
from razorctl.rules.allocation import largest
from razorctl.surgery import freezing, reruns
from razorctl.surgery.rerun_choice import groups as rerun_groups
from razorctl.surgery.rerun_choice import measured
from razorctl.surgery.rerun_choice import unfit as unfit_block
from razorctl.surgery.sparsify import (
    RECIPE,
    log_stock,
    recipe_of,
    refuse_sparsified,
    restore,
    sparsify,
    swap,
)

log = logging.getLogger(__name__)

TIGHTER = 0.97  # of the bytes, from one try to the next
LEAST = 0.01  # share of the bytes of full from which on a warning names a part
FELL_BACK = 0.9  # of what a stock module keeps, from which on a razor layer ran as one
CLASSIFIER = "the classifier"
RERUN_BITS = (8, 6, 4)  # of copies of the inputs of blocks that run again


def sparsify_within(
    model: nn.Module,
    recipe: Recipe,
    inputs: Any,
    *,
    autocast: torch.dtype | None = None,
    forward: Forward | None = None,
    full: int | None = None,
) -> tuple[str, ...]:
    """Sparsifies a model so that a step on `inputs` keeps at most 1 - ratio of what full keeps.

    `sparsify` alone chooses rules that meet the byte budget on the models that they were measured
    on. This function traces the model at hand and takes rules of fewer bits where it keeps more. If
    none meet the budget, blocks whose layers stay stock run again in the backward pass, from copies
    of their inputs in 8 bits or fewer (`reruns`), or from the inputs themselves if the model reads
    values; those that spare most are first. A method without a byte budget
    is left to `sparsify`. Activation checkpointing changes no rule: the budget is met without it,
    and must be met with it too.

    Returns the names of the modules that run again, then those of the swapped ones. Raises what
    `sparsify` raises, and UsageError with the largest ratio that can be met if this one cannot; the
    model is then as it was.

    Args:
        model: a stock model.
        recipe: its ratio is the byte budget.
        inputs: of a step, as in `saved_bytes`.
        autocast: the dtype of a mixed-precision step, None for none.
        forward: as in `saved_bytes`.
        full: the bytes that a step on `inputs` keeps in full, if they are known.
    """
    if not recipe.has_byte_budget:
        return sparsify(model, recipe)
    refuse_sparsified(model)
    run: dict[str, Any] = {"autocast": autocast, "forward": forward}
    again, full = on_copies(partial(_tried, recipe, full, run), model, inputs)
    assert again.ratio is not None
    names = (*again.names, *swap(model, replace(recipe, ratio=again.ratio)))
    again.attach(model)
    if recipe.activation_checkpointing:
        _check_checkpointed(model, recipe, traced_bytes(model, inputs, **run), full)
    setattr(model, RECIPE, recipe)
    if again.names:
        what = "their inputs" if again.bits is None else f"{again.bits} bits"
        log.info("run again in the backward pass, from %s: %s", what, again.stars())
    log_stock(model, recipe)
    return names


def _tried(
    recipe: Recipe, full: int | None, run: Mapping[str, Any], twin: nn.Module, inputs: Any
) -> tuple["_Reruns", int]:
    """The way to meet a recipe's byte budget on a copy of a model, and the bytes that full keeps.

    Raises UsageError with the largest ratio that can be met if this one cannot.
    """
    known = traced_bytes(twin, inputs, **run) if full is None else full
    plain, budget = replace(recipe, activation_checkpointing=False), (1 - recipe.ratio) * known

    def parts(ratio: float) -> dict[str, int]:
        restore(twin)
        swap(twin, replace(plain, ratio=ratio))
        return traced_bytes_by_module(twin, inputs, **run)

    again = _Reruns(_meeting(parts, recipe.ratio, budget))
    if again.ratio is None and not recipe.activation_checkpointing:
        again = _rerunning(twin, inputs, plain, budget, run)
    if again.ratio is None:
        least = traced_bytes_by_module(twin, inputs, **run)
        reasons = [uncompressed(twin, least, known, budget), again.refusal]
        possible = math.floor(1000 * (1 - sum(least.values()) / known)) / 1000
        raise UsageError(
            f"ratio {recipe.ratio:g} cannot be met by {type(twin).__name__} with this batch"
            f"{''.join(f': {reason}' for reason in reasons if reason)}; "
            f"the largest that can is {max(0.0, possible):g}."
        )
    return again, known


class _Reruns(NamedTuple):
    """The ratio of the rules, None if none will do; blocks that run again, by name.

    bits: of the copies of their inputs; None keeps these as they are. refusal: a sentence about a
    block that cannot.
    """

    ratio: float | None
    bits: int | None = None
    names: tuple[str, ...] = ()
    refusal: str = ""

    def attach(self, model: nn.Module) -> None:
        memo = Memo()
        for name in self.names:
            reruns.attach(model.get_submodule(name), name, self.bits, memo)

    def stars(self) -> str:
        """The names as text, one for those that differ in numbers alone."""
        stars = Counter(map(starred, self.names))
        return ", ".join(f"{count} x {name}" for name, count in stars.items())


def _rerunning(
    twin: nn.Module, inputs: Any, recipe: Recipe, budget: float, run: Mapping[str, Any]
) -> _Reruns:
    """The blocks of a fake model that run again to meet a budget, with as few of them as suffice.

    Elements of lists are tried first, then any module, and both with the rules of fewest bits. The
    twin is left with the last that was tried.
    """

    def put(again: _Reruns) -> None:
        restore(twin)
        swap(twin, replace(recipe, ratio=again.ratio or recipe.ratio))
        again.attach(twin)

    def meets(again: _Reruns) -> bool:
        put(again)
        return traced_bytes(twin, inputs, **run) <= budget

    # What depends on values, such as a choice of experts, may differ at the values of copies, and
    # so the shapes of what is kept.
    widths = (None,) if mode_of(twin.parameters()) is None else RERUN_BITS
    refusal = ""
    for ratio in (recipe.ratio, max(recipe.ratio, largest())):
        put(_Reruns(ratio))
        modules = measured(twin, inputs, **run)
        for listed in (True, False):
            groups = rerun_groups(modules, budget, listed)
            names = [tuple(chain(*groups[:count])) for count in range(1, len(groups) + 1)]
            for bits in widths if names else ():
                ways = [_Reruns(ratio, bits, part) for part in names]
                if meets(ways[-1]):
                    return ways[bisect_left(ways[:-1], True, key=meets)]
        if unfit := unfit_block(modules):
            kind = type(twin.get_submodule(unfit)).__name__
            why = f"gets an argument of type {modules[unfit].unknown}"
            refusal = f"{unfit} ({kind}) {why}, so it cannot run again"
    return _Reruns(None, refusal=refusal)


def _meeting(
    parts: Callable[[float], Mapping[str, int]], ratio: float, budget: float
) -> float | None:
    """The ratio, from `ratio` on, whose rules keep at most `budget` bytes; None if none do.

    parts: the bytes that each module keeps by the rules of a ratio.
    """

    def meets(ratio: float) -> bool:
        return sum(parts(ratio).values()) <= budget

    most = largest()
    if meets(ratio):
        return ratio
    if ratio >= most or not meets(most):
        return None
    steps = math.ceil(math.log((1 - most) / (1 - ratio), TIGHTER))
    tighter = [1 - (1 - ratio) * TIGHTER**step for step in range(1, steps)]
    return [*tighter, most][bisect_left(tighter, True, key=meets)]


def _check_checkpointed(model: nn.Module, recipe: Recipe, now: int, full: int) -> None:
    """Raises UsageError if a model that checkpoints keeps too much, after restoring it."""
    if now > (1 - recipe.ratio) * full:
        restore(model)
        # Well below, since rules of more bits add to the rest.
        possible = math.floor(20 * (1 - now / full)) / 20
        share = units.percent(now / full)
        raise UsageError(
            f"activation checkpointing keeps {share} of what full fine-tuning keeps of this batch, "
            f"more than ratio {recipe.ratio:g} allows; leave it out, or choose "
            f"a ratio such as {max(0.0, possible):g}."
        )


def saved_bytes(
    model: nn.Module,
    inputs: Any,
    *,
    autocast: torch.dtype | None = None,
    forward: Forward | None = None,
) -> int:
    """Bytes that autograd would hold between the forward and backward pass of a training step.

    Unique storages are counted, without parameters and buffers, which exist anyway. The pass runs
    on fake copies in train mode, so it allocates nothing, computes nothing and does not change the
    model, samplers or random state. A model that reads values runs on a real copy instead. Under a
    joint budget the largest blocks count as drawn. A warning says if a model exceeds its byte
    budget, and by how much. Raises UsageError, which names the module, if what the model does
    depends on values that it or the inputs do not have.

    Args:
        model: real, fake or on the meta device.
        inputs: a tensor, a tuple of arguments or a mapping of keywords; real, fake or on the meta
            device.
        autocast: the dtype of a mixed-precision step, None for none.
        forward: runs a model on inputs, and may compute a loss, whose kept bytes then count too;
            None calls the model.
    """
    recipe = recipe_of(model)
    if recipe is None or not recipe.has_byte_budget:
        return traced_bytes(model, inputs, autocast=autocast, forward=forward)
    parts = traced_bytes_by_module(model, inputs, autocast=autocast, forward=forward)

    def of_stock(twin: nn.Module, inputs: Any) -> dict[str, int]:
        restore(twin)
        return traced_bytes_by_module(twin, inputs, autocast=autocast, forward=forward)

    note_excess(model, recipe, parts, on_copies(of_stock, model, inputs))
    return sum(parts.values())


def note_excess(
    model: nn.Module, recipe: Recipe, parts: Mapping[str, int], stock: Mapping[str, int]
) -> None:
    """Warns if a sparsified model exceeds its byte budget; parts, stock: as in `uncompressed`."""
    total, full = sum(parts.values()), sum(stock.values())
    most = (1 - recipe.ratio) * full
    if total > most:
        unknown = uncompressed(model, parts, full, most, stock)
        log.warning(
            "%s keeps %s for backward of what full fine-tuning does, more than the %s that ratio "
            "%g allows%s; razorctl.sparsify_within keeps less, where that can mend it.",
            type(model).__name__,
            units.percent(total / full),
            units.percent(1 - recipe.ratio),
            recipe.ratio,
            unknown and f": {unknown}",
        )


def uncompressed(
    model: nn.Module,
    parts: Mapping[str, int],
    full: int,
    most: float,
    stock: Mapping[str, int] | None = None,
) -> str:
    """A sentence about the modules that stay stock: what they are, and their shares of `full`.

    It is empty if they keep at most `most` bytes.

    Args:
        model: a sparsified model.
        parts: the bytes that its modules keep, as `traced_bytes_by_module` returns them.
        full: the bytes that the stock model keeps.
        most: the least that the sentence is about, in bytes.
        stock: the bytes that the modules of the stock model keep, if they are known. A razor layer
            that keeps as much ran the stock forward.
    """
    counts, sizes = Counter[str](), Counter[str]()
    for name, size in parts.items():
        module = model.get_submodule(name)
        fell_back = stock is not None and size >= FELL_BACK * stock.get(name, math.inf)
        razor = isinstance(module, RazorLayer) and not fell_back
        if not razor and not reruns.attached(module):
            part = _part(model, module)
            counts[part] += 1
            sizes[part] += size
    if sizes.total() <= most:
        return ""
    largest_first = sizes.most_common()
    large = [(part, size) for part, size in largest_first if size >= LEAST * full]
    large = large or largest_first[:1]
    words: list[str] = []
    for part, size in large:
        what = part if part == CLASSIFIER else units.count(counts[part], part)
        of_full = "" if words else " of full's activations"
        words.append(f"{what} ({units.percent(size / full)}{of_full})")
    one = len(large) == 1 and counts[large[0][0]] == 1
    return f"{', '.join(words)} {'is' if one else 'are'} not compressed"


def _part(model: nn.Module, module: nn.Module) -> str:
    """A noun for a stock module."""
    with suppress(UsageError):  # a model without a last layer
        if freezing.head(model)[1] is module:
            return CLASSIFIER
    kind = stock_type(module).__name__
    return f"{kind} module" if any(module.children()) else f"{kind} layer"
