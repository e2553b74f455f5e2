"""The figures of a comparison: rows, the best of each column, and the Pareto front."""

from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from razorctl import units
from razorctl.config.tasks import LEAST
from razorctl.methods import METHODS
from razorctl.planning.candidates import reserve
from razorctl.training.comparing import advice
from razorctl.training.comparing.comparison import Comparison, Entry
from razorctl.version import __version__

TARGET = 0.99  # share of the best score of full
# Columns beside memory and score: less is better in COSTS, more is better in GAINS.
COSTS = ("memory_vs_full", "step_seconds", "epoch_seconds", "time_to_target")
GAINS = ("speedup_vs_full", "accuracy")


def document(
    comparison: Comparison,
    target: float | None = None,
    peaks: Mapping[str, int] | None = None,
    budget: int | None = None,
) -> dict[str, Any]:
    """The comparison under the stable keys of `compare --json`: a row for each entry.

    Times are medians over the seeds; accuracies are means with a sample standard deviation.
    `memory` is the column by which memory is compared: the measured peak if all runs have one, else
    the traced peak if all rows have one, else the traced bytes stored for backward. `needed_bytes`
    are a row's peak and what a process needs beside it, and `fits` whether `budget_bytes` suffice;
    None if one of them is not known. `metric` is the figure of `score`: the metric of the runs,
    or the first figure of their task if they have several metrics. `compile` is the setting, and
    `compiled` whether steps were compiled. `take` is the result of `advice.take`; in a grid with
    lists it compares the best row of each method. `command` trains like the row to take.

    target: None is TARGET of the best score of `full`, averaged over seeds, or that share inverted
    if less is better. peaks: label -> traced peak in bytes. budget: bytes that a row must fit.
    """
    done = [entry for entry in comparison.entries if entry.runs]
    runs = [run.result for entry in done for run in entry.runs]
    measured = bool(runs) and all(result["peak_bytes"] is not None for result in runs)
    peaks = peaks or {}
    traced = bool(done) and all(entry.label in peaks for entry in done)
    memory = "peak_bytes" if measured else "traced_peak_bytes" if traced else "saved_bytes"
    full = next((entry for entry in done if _reference(entry, done) is entry), None)
    if target is None and full is not None:
        best, least = fmean(run.best for run in full.runs), full.runs[0].figure in LEAST
        target = best / TARGET if least else best * TARGET
    rows = [_row(entry, peaks.get(entry.label), target, budget) for entry in comparison.entries]
    row_of = {row["label"]: row for row in rows}
    for entry, row in zip(comparison.entries, rows, strict=True):
        if (reference := _reference(entry, done)) is not None:
            plain = row_of[reference.label]
            row["memory_vs_full"] = row[memory] / plain[memory]
            row["speedup_vs_full"] = plain["step_seconds"] / row["step_seconds"]
    metric = done[0].runs[0].figure if done else None
    _mark(rows, memory, metric in LEAST)
    take = _advice(comparison.entries, row_of, memory, metric, budget)
    commands = {entry.label: entry.command for entry in comparison.entries}
    return {
        "razorctl": __version__,
        "model": comparison.model,
        "dataset": comparison.dataset,
        "metric": metric,
        "devices": sorted({result["device"] for result in runs}),
        "shared": _shared([result["job"] for result in runs]),
        "memory": memory,
        "target": target,
        "budget_bytes": budget,
        "seeds": sorted({result["job"]["seed"] for result in runs}),
        "rows": rows,
        "pareto": [row["label"] for row in rows if row["pareto"]],
        "best": {
            name: [row["label"] for row in rows if name in row["best"]]
            for name in (memory, *COSTS, *GAINS)
        },
        "take": take,
        "command": commands.get(take["label"] or ""),
    }


def _advice(
    entries: Sequence[Entry],
    row_of: Mapping[str, dict[str, Any]],
    memory: str,
    metric: str | None,
    budget: int | None,
) -> advice.Advice:
    """What to take: of the best rows of all methods, or of the settings of a single one.

    row_of: label -> the row of an entry.
    """
    best_of = _best_of_methods(entries, row_of)
    alike = all(entry.settings == best_of[0].settings for entry in best_of)
    if len(best_of) != 1 or not best_of[0].values:
        judged = [row_of[entry.label] for entry in best_of]
        return advice.take(judged, memory, metric, alike, budget)
    (best,) = best_of
    rows = [row_of[entry.label] for entry in entries if entry.method == best.method]
    if budget is None:
        fit = ""
    elif row_of[best.label]["fits"]:
        rows, fit = [row for row in rows if row["fits"]], f" that fit {units.size(budget)}"
    else:
        return advice.nothing_fits(rows, budget)
    settings, seeds = units.count(len(rows), "setting"), units.count(len(best.runs), "seed")
    return {"label": best.label, "why": f"the best of {settings}{fit} ({seeds})"}


def _best_of_methods(entries: Sequence[Entry], row_of: Mapping[str, Any]) -> list[Entry]:
    """The entries with runs; only the best one of a method with lists, which fits if any does.

    row_of: label -> the row of an entry.
    """
    done = [entry for entry in entries if entry.runs]

    def judged(entry: Entry) -> tuple[bool, float]:
        fits = row_of[entry.label]["fits"] is not False
        return fits, fmean(run.judged for run in entry.runs)

    chosen: dict[str, Entry] = {}
    for entry in (each for each in done if each.values):
        chosen[entry.method] = max(chosen.get(entry.method, entry), entry, key=judged)
    return [entry for entry in done if not entry.values or entry in chosen.values()]


def _shared(jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The settings that all jobs have in common."""
    first = jobs[0] if jobs else {}
    return {k: v for k, v in first.items() if all(job.get(k) == v for job in jobs)}


def _reference(entry: Entry, done: Sequence[Entry]) -> Entry | None:
    """The entry of plain full fine-tuning with the same settings and device, if there is one.

    A plain entry has automatic attention, no activation checkpointing, and the least `effort`. The
    first choice among several has the same values, and the next the nearest number of steps.
    """
    if not entry.runs:
        return None
    alike = [other for other in done if other.settings == entry.settings]
    efforts = [other.effort for other in alike]
    least = tuple(min(column) for column in zip(*efforts, strict=True))
    plain = [
        other
        for other in alike
        if other.recipe.method == "full"
        and not other.recipe.approximates
        and other.recipe.attention == "auto"
        and not other.recipe.checkpoints
        and other.effort == least
    ]

    def far(other: Entry) -> tuple[bool, int]:
        return other.values != entry.values, abs(other.job["steps"] - entry.job["steps"])

    return min(plain, key=far, default=None)


def _row(
    entry: Entry, traced: int | None, target: float | None, budget: int | None
) -> dict[str, Any]:
    """The row of an entry, without comparisons; traced: its traced peak in bytes."""
    results = [run.result for run in entry.runs]
    ratio = entry.recipe.ratio if METHODS[entry.recipe.method].has_ratio else None
    accuracies = [r["accuracy"] for r in results if r["accuracy"] is not None]
    losses = [r["loss"] for r in results if r["loss"] is not None]
    row: dict[str, Any] = {
        "method": entry.method,
        "ratio": ratio,
        "joint_budget": entry.recipe.joint_budget,
        "attention": entry.recipe.attention,
        "saved_bytes": _largest(results, "saved_bytes"),
        "peak_bytes": _largest(results, "peak_bytes"),
        "step_seconds": _median(results, "step_seconds"),
        "epoch_seconds": _median(results, "epoch_seconds"),
        "accuracy": fmean(accuracies) if accuracies else None,
        "accuracy_std": stdev(accuracies) if len(accuracies) > 1 else None,
        "memory_vs_full": None,
        "speedup_vs_full": None,
        "time_to_target": None,
        "error": entry.error,
        "label": entry.label,
        "accumulate": entry.job.get("accumulate"),
        "score": fmean(run.score for run in entry.runs) if results else None,
        "score_std": stdev(run.score for run in entry.runs) if len(results) > 1 else None,
        "seeds": [result["job"]["seed"] for result in results],
        "accuracies": accuracies,
        "run_dirs": [str(run.directory) for run in entry.runs],
        "compile": entry.job.get("compile"),
        "activation_memory_budget": entry.job.get("activation_memory_budget"),
        "compiled": all(result["compiled"] for result in results) if results else None,
        "steps": entry.job.get("steps"),
        "exact": not entry.recipe.approximates,
        "loss": fmean(losses) if losses else None,
        "traced_peak_bytes": traced,
        "needed_bytes": None,
        "fits": None,
    }
    peak = traced if row["peak_bytes"] is None else row["peak_bytes"]
    if peak is not None:
        row["needed_bytes"] = peak + reserve(peak)
        row["fits"] = None if budget is None else row["needed_bytes"] <= budget
    if target is not None:
        times = [run.time_to(target) for run in entry.runs]
        reached = [time for time in times if time is not None]
        row["time_to_target"] = median(reached) if times and reached == times else None
    return row


def _largest(results: Sequence[Mapping[str, Any]], name: str) -> Any:
    values = [result[name] for result in results]
    return max(values) if values and None not in values else None


def _median(results: Sequence[Mapping[str, Any]], name: str) -> Any:
    values = [result[name] for result in results if result[name] is not None]
    return median(values) if values else None


def _mark(rows: Sequence[dict[str, Any]], memory: str, least: bool) -> None:
    """Adds `best`, the columns where a row is best, and `pareto`, whether it is on the front.

    least: whether a lower score is better.
    """
    for row in rows:
        row["best"], row["pareto"] = [], False
    gains = GAINS if least else (*GAINS, "score")
    for name in (memory, *COSTS, *GAINS, "score"):
        values = [row[name] for row in rows if row[name] is not None]
        best = max(values, default=None) if name in gains else min(values, default=None)
        for row in rows:
            if best is not None and row[name] == best:
                row["best"].append(name)
    done, sign = [row for row in rows if row["score"] is not None], 1 if least else -1
    points = [(row[memory], row["step_seconds"], sign * row["score"]) for row in done]
    for row, on_front in zip(done, pareto(points), strict=True):
        row["pareto"] = on_front


def pareto(points: Sequence[tuple[float, ...]]) -> list[bool]:
    """For each point, whether no other point is less in one number and more in none."""
    return [
        not any(q != p and all(b <= a for a, b in zip(p, q, strict=True)) for q in points)
        for p in points
    ]
