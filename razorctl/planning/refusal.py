"""The refusal of a job that does not fit a card: the bytes it needs, and a change that fits."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from razorctl import units
from razorctl.config.job import resolve_precision
from razorctl.config.keywords import Prefer
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.planning.search import ADAPTERS, Search
from razorctl.planning.searches import Searches
from razorctl.planning.states import State, leaner

WIDER: dict[Prefer, tuple[Prefer, ...]] = {  # preferences that allow more ways
    "exact": ("balanced", "fast"),
    "balanced": ("fast",),
    "fast": (),
}
SMALLER = (0.75, 0.5, 0.25)  # shares of the input size that are tried if nothing fits


def needed_bytes(searches: Searches, prefer: Prefer) -> int:
    """The smallest budget in which a preference has a way.

    Raises UsageError if no way can be traced.
    """
    least = math.inf
    for search in searches.leanest(prefer):
        if search.least < least and searches.hosts(search):
            least = min([least, *_sizes(search, prefer)])
    if least == math.inf:
        why = next(iter(searches.asked.reasons.get(prefer, ())), "no way is allowed.")
        raise UsageError(f"no way to train {searches.asked.job.model} can be traced: {why}")
    return int(least)


def message(searches: Searches, prefer: Prefer) -> str:
    """The error message if nothing fits; it says what to change."""
    needed = units.size(needed_bytes(searches, prefer), math.ceil)
    job, budget = searches.asked.job, units.size(searches.asked.budget, math.floor)
    return (
        f"{job.model} on {job.dataset} does not fit in {budget}; it needs at least {needed}, "
        f"{_smallest_change(searches, prefer)}."
    )


def _sizes(search: Search, prefer: Prefer) -> Iterator[int]:
    """Bytes needed by the ways of a preference that may need least, likely ones first.

    All counts of micro-batches between the two need more, and so does a smaller ratio. If no
    gradient stays on the card, one pass needs more too.
    """
    counts = [search.counts[::-1], [1]][: 1 if search.state.on_host else 2]
    recipes = sorted(search.allowed(prefer), key=lambda recipe: -recipe.ratio)
    for tried in counts:
        seen = set[Recipe]()
        for recipe in recipes:
            alike = replace(recipe, ratio=0)
            if alike not in seen:
                count = next((n for n in tried if search.possible(recipe, n)), None)
                if count is not None:
                    seen.add(alike)
                    yield search.predict(recipe, count).predicted.needed_bytes


def _fits(searches: Searches, prefer: Prefer) -> bool:
    """Whether any way of a preference fits."""
    budget = searches.asked.budget
    sizes = (size for search in searches.possible(prefer) for size in _sizes(search, prefer))
    with suppress(UsageError):  # an input size that the model cannot take
        return any(size <= budget for size in sizes)
    return False


def _smallest_change(searches: Searches, prefer: Prefer) -> str:
    """The smallest change of recipe, preference or job that fits, as the end of a sentence."""
    recipe = searches.asked.recipe
    if recipe is not None:
        if _fits(searches.like(None), "balanced"):
            return "and fits with another recipe; leave the settings of this one out"
    else:
        for other in WIDER[prefer]:
            if _fits(searches, other):
                return f"and fits with --prefer {other}"
    for flags, settings in changes(searches):
        if _fits(searches.like(recipe, **settings), prefer):
            return f"and fits with {' and '.join(flags)}"
    if recipe is None and searches.asked.fastest([ADAPTERS]):
        return f"and only --method {ADAPTERS.method} fits, which trains only adapters"
    return "so choose a smaller model, or a GPU with that much memory"


def changes(searches: Searches) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Flags and settings of jobs that need less memory, small changes first.

    Weights and state change only where the user gave them; a plan tries the others itself.
    """
    job = searches.asked.job
    half = resolve_precision("auto", searches.asked.gpu.compute_capability)
    flags, settings = list[str](), dict[str, Any]()
    if job.precision == "fp32" != half:
        flags, settings = [f"--precision {half}"], {"precision": half}
        yield flags, settings
    for state in leaner(searches.like(searches.asked.recipe, **settings).asked.job, "balanced"):
        given = {
            name: value
            for name, value in state._asdict().items()
            if getattr(searches.job, name) not in (None, value)
        }
        if given:
            yield [*flags, *_flags(state, given)], settings | given
    if job.input_size is not None:  # smaller sizes, then the model's own
        for size in (round(job.input_size * share / 32) * 32 for share in SMALLER):
            if 0 < size < job.input_size:
                yield [*flags, f"--input-size {size}"], settings | {"input_size": size}
        yield [*flags, "the model's own input size"], settings | {"input_size": None}


def _flags(state: State, names: Any) -> Iterator[str]:
    """The flags that give some settings of a state."""
    for name in names:
        flag, value = f"--{name.replace('_', '-')}", getattr(state, name)
        yield flag if value is True else f"--no-{flag[2:]}" if value is False else f"{flag} {value}"
