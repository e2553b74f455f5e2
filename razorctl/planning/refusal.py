"""The refusal of a job that does not fit a card: the bytes it needs, and a change that fits."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from razorctl import units
from razorctl.config.job import Job, resolve_precision
from razorctl.config.keywords import Prefer
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.planning.candidates import CONTEXT, FRAGMENTATION
from razorctl.planning.search import ADAPTERS, Search

WIDER: dict[Prefer, tuple[Prefer, ...]] = {  # preferences that allow more ways
    "exact": ("balanced", "fast"),
    "balanced": ("fast",),
    "fast": (),
}
SMALLER = (0.75, 0.5, 0.25)  # shares of the input size that are tried if nothing fits


def needed_bytes(search: Search, prefer: Prefer) -> int:
    """The smallest budget in which a preference has a way.

    Raises UsageError if no way can be traced.
    """
    sizes = list(_sizes(search, prefer))
    if not sizes:
        why = next(iter(search.reasons.get(prefer, ())), "no way is allowed.")
        raise UsageError(f"no way to train {search.job.model} can be traced: {why}")
    return min(sizes)


def message(search: Search, prefer: Prefer) -> str:
    """The error message if nothing fits; it says what to change."""
    needed = units.size(needed_bytes(search, prefer), math.ceil)
    return (
        f"{search.job.model} on {search.job.dataset} does not fit in "
        f"{units.size(search.budget, math.floor)}; it needs at least {needed}, "
        f"{_smallest_change(search, prefer)}."
    )


def _sizes(search: Search, prefer: Prefer) -> Iterator[int]:
    """Bytes needed by the ways of a preference that may need least, likely ones first."""
    for counts in (reversed(search.counts), (1,)):  # all counts between need more
        tried = list(counts)
        for recipe in search.allowed(prefer):
            count = next((n for n in tried if search.possible(recipe, n)), None)
            if count is not None:
                yield search.predict(recipe, count).predicted.needed_bytes


def _fits(search: Search, prefer: Prefer) -> bool:
    """Whether any way of a preference fits."""
    return any(size <= search.budget for size in _sizes(search, prefer))


def _smallest_change(search: Search, prefer: Prefer) -> str:
    """The smallest change of recipe, preference or job that fits, as the end of a sentence."""
    if search.recipe is not None:
        if _fits(_like(search, search.job, None), "balanced"):
            return "and fits with another recipe; leave the settings of this one out"
    else:
        for other in WIDER[prefer]:
            if _fits(search, other):
                return f"and fits with --prefer {other}"
    flags: dict[str, str] = {}
    settings: dict[str, Any] = {}
    for flag, change in changes(search):
        settings |= change
        flags |= dict.fromkeys(change, flag)
        if "input_size" not in settings and _floor(search) > search.budget:
            continue  # the weights alone do not fit, so no trace is needed
        smaller = _like(search, replace(search.job, **settings), search.recipe)
        with suppress(UsageError):  # a size that the model cannot take
            if _fits(smaller, prefer):
                return f"and fits with {' and '.join(flags.values())}"
    if search.recipe is None and search.fastest([ADAPTERS]):
        return f"and only --method {ADAPTERS.method} fits, which trains only adapters"
    return "so choose a smaller model, or a card with as much memory"


def _like(search: Search, job: Job, recipe: Recipe | None) -> Search:
    """A search on the same card for a job with the same data set and model."""
    rest = search.cache, search.report, search.facts
    return Search(job, search.gpu, search.budget, recipe, *rest)


def _floor(search: Search) -> int:
    """Bytes that a card needs for the weights alone; some weights depend on the input size."""
    weights = min(way.predicted.weights_bytes for way in search.candidates.values())
    return CONTEXT + math.ceil((1 + FRAGMENTATION) * weights)


def changes(search: Search) -> Iterator[tuple[str, dict[str, Any]]]:
    """Flags and settings that make the job smaller; each is tried with those before it."""
    job = search.job
    half = resolve_precision("auto", search.gpu.compute_capability)
    if job.precision == "fp32" != half:
        yield f"--precision {half}", {"precision": half}
    # 8-bit AdamW has less state than SGD, and trains like AdamW at the same learning rate.
    if job.optimizer == "adamw" and search.shards == 1:
        yield "--optimizer adamw8bit", {"optimizer": "adamw8bit"}
    if job.input_size is not None:  # smaller sizes, then the model's own
        for size in (round(job.input_size * share / 32) * 32 for share in SMALLER):
            if 0 < size < job.input_size:
                yield f"--input-size {size}", {"input_size": size}
        yield "the model's own input size", {"input_size": None}
