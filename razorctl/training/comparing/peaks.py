"""Peaks of runs: traced ones of runs without a card, and the memory of a card that a peak needs."""

from collections.abc import Callable

from razorctl import data
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.memory.trace_cache import Cache
from razorctl.planning import detect, gpus
from razorctl.planning.cached_traces import cached_trace
from razorctl.training.comparing.comparison import Comparison


def measured(comparison: Comparison) -> bool:
    """Whether all runs have a measured peak."""
    runs = [run for entry in comparison.entries for run in entry.runs]
    return all(run.result["peak_bytes"] is not None for run in runs)


def traced_peaks(comparison: Comparison, report: Callable[[str], object]) -> dict[str, int]:
    """Label -> bytes of the peak of a step on a card, traced as `plan` does, once for all seeds.

    None is traced of a run with an activation memory budget, whose effect cannot be traced. Raises
    RazorError if the model or the data are not there any more. report: called with the label of
    each trace.
    """
    done = [entry for entry in comparison.entries if entry.runs]
    cache, peaks = Cache(), dict[str, int]()
    classes = data.pair(Job(**done[0].job))[1].classes
    for entry in done:
        job = Job(**entry.job)
        if job.activation_memory_budget is None:
            report(entry.label)
            recipe = Recipe(**entry.runs[0].result["recipe"])
            peaks[entry.label] = cached_trace(job, recipe, classes, cache).highest
    return peaks


def card_memory(vram: str | None, gpu: str | None) -> int | None:
    """Bytes that a method must fit: of a size, of a preset, or of both as in a plan; None if none.

    Raises UsageError for a wrong size or preset, and for a size that the card does not have.
    """
    if gpu is not None:
        return detect.target(gpu, vram).budget
    return None if vram is None else gpus.memory_size(vram)
