"""The largest batch that fits a card in one pass."""

from collections.abc import Callable
from dataclasses import replace

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.memory import trace_cache as traces
from razorctl.planning.cached_traces import job_facts
from razorctl.planning.candidates import label
from razorctl.planning.gpus import Gpu
from razorctl.planning.search import Search

TRIED = (8, 16)  # examples per process; the memory of other sizes is extrapolated from these


def largest_batch(
    job: Job,
    gpu: Gpu,
    recipe: Recipe,
    budget: int,
    *,
    most: int | None = None,
    cache: traces.Cache | None = None,
    report: Callable[[str], object] = lambda _: None,
) -> int:
    """The largest batch at which a recipe fits `budget` bytes of a card without micro-batches.

    It is a power of two per process: 1 if nothing fits, and at most the training examples. Raises
    what `plan` raises.

    Args:
        most: the largest batch to try, in examples; None for all training examples.
        report: called with the label of each trace.
    """
    cache, facts = cache or traces.Cache(), job_facts(job)
    most = min(most or 2**62, facts["train_examples"] or 2**62) // job.processes

    def needed(size: int) -> int:
        whole = replace(job, batch_size=size * job.processes, accumulate=1)
        report(f"{label(recipe, 1)}, batch {whole.batch_size}")
        search = Search(whole, gpu, budget, recipe, cache, facts=facts)
        return search.needed_bytes(recipe)

    small, large = TRIED
    if most < large:
        size = _power(most)
    else:
        each = (needed(large) - needed(small)) / (large - small)
        guess = large + (budget - needed(large)) / max(each, 1)
        size = _power(min(most, max(1, int(guess))))
    while size > 1 and (needs := needed(size)) > budget:
        # As if memory were proportional to the batch; it almost is if the batch is far too large.
        size = min(size // 2, _power(max(1, size * budget // needs)))
    while 2 * size <= most and needed(2 * size) <= budget:
        size *= 2
    return size * job.processes


def _power(number: int) -> int:
    """The largest power of two up to a number."""
    return 1 << max(0, number.bit_length() - 1)
