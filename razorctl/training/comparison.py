"""Finished runs side by side: a row of figures for each, the best figures, the Pareto front."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import razorctl
from razorctl.config.settings import read_toml
from razorctl.errors import DataError, RazorError, UsageError
from razorctl.job import FIGURES, LEAST
from razorctl.methods import METHODS
from razorctl.planning.candidates import label
from razorctl.recipe import Recipe
from razorctl.training.rundir import CONFIG, METRICS, RESULT

# Baselines that are `full` in another way, by the attention they run with.
BASELINES = {"full-stored": "stored", "full-flash": "flash", "accumulate": "auto"}
NAMES = (*METHODS, *BASELINES)
# Files in the directory of a grid, and in the directory of a run that failed.
SETTINGS, FAILURE = "comparison.toml", "failure.json"

TARGET = 0.99  # of full's best score
IN_LABEL = ("method", "ratio", "joint_budget", "joint", "attention", "int8_forward", "accumulate")
# Columns of a row beside its memory: less is better in COSTS, more is better in GAINS.
COSTS = ("memory_vs_full", "step_seconds", "epoch_seconds", "time_to_target")
GAINS = ("speedup_vs_full", "accuracy")


@dataclass(frozen=True)
class FinishedRun:
    """A run directory: its result, and the lines of its metrics.jsonl."""

    directory: Path
    result: dict[str, Any]
    steps: list[dict[str, Any]]

    @property
    def figure(self) -> str:
        """What the run is judged by: the first figure of its task."""
        return FIGURES[self.result["job"].get("task") or "classification"][0]

    @property
    def score(self) -> float:
        """The final value of that figure."""
        return float(self.result["metrics"][self.figure])

    @property
    def best(self) -> float:
        """The best value of that figure in the run's evaluations."""
        values = [float(s["metrics"][self.figure]) for s in self.steps if s["metrics"] is not None]
        return min(values) if self.figure in LEAST else max(values)

    def time_to(self, target: float) -> float | None:
        """Seconds of training until an evaluation and all later ones reach `target`; else None.

        The time of the evaluations themselves is not counted.
        """
        seconds, reached = 0.0, None
        for step in self.steps:
            seconds += step["seconds"]
            if step["metrics"] is None:
                continue
            value, least = step["metrics"][self.figure], self.figure in LEAST
            if value > target if least else value < target:
                reached = None
            elif reached is None:
                reached = seconds
        return reached


@dataclass(frozen=True)
class Entry:
    """The runs of one row, which differ only in their seeds.

    method: the name that was asked for, one of NAMES. label: tells the row from the others.
    failures: seed -> the error of the run, with its exit code.
    """

    method: str
    label: str
    recipe: Recipe
    runs: list[FinishedRun] = field(default_factory=list)
    failures: dict[int, RazorError] = field(default_factory=dict)

    @property
    def settings(self) -> tuple[Any, ...]:
        """The device and the job of the runs, without the seed and the micro-batches."""
        result = self.runs[0].result
        job = {k: v for k, v in result["job"].items() if k not in ("seed", "accumulate")}
        return result["device"], job

    @property
    def accumulate(self) -> int:
        """Number of micro-batches in a step."""
        count: int = self.runs[0].result["job"]["accumulate"]
        return count

    @property
    def error(self) -> str | None:
        """Why runs of this entry are missing; None if none is."""
        if not self.failures:
            return None
        sentence = str(next(iter(self.failures.values())))
        return f"seed {', '.join(map(str, self.failures))}: {sentence}" if self.runs else sentence


@dataclass(frozen=True)
class Comparison:
    """The entries of one model and data set; some may have no finished run."""

    model: str
    dataset: str
    entries: Sequence[Entry]

    @property
    def exit_code(self) -> int:
        """0 if any run has a result, else the exit code that all runs share, or 1."""
        if any(entry.runs for entry in self.entries):
            return 0
        codes = {error.exit_code for entry in self.entries for error in entry.failures.values()}
        return codes.pop() if len(codes) == 1 else 1

    def document(self, target: float | None = None) -> dict[str, Any]:
        """The comparison under the stable keys of `compare --json`: a row for each entry.

        Times are medians over the seeds; accuracies are means with a sample standard deviation.
        `memory` names the column that memory is compared by: the measured peak if all runs have
        one, else the traced saved bytes. `metric` names the figure of the task that the `score` of
        a row is. A `target` of None is 99 % of `full`'s best score, averaged over its seeds, or as
        far above it where less is better.
        """
        done = [entry for entry in self.entries if entry.runs]
        runs = [run.result for entry in done for run in entry.runs]
        measured = bool(runs) and all(result["peak_bytes"] is not None for result in runs)
        memory = "peak_bytes" if measured else "saved_bytes"
        full = next((entry for entry in done if _reference(entry, done) is entry), None)
        if target is None and full is not None:
            best, least = fmean(run.best for run in full.runs), full.runs[0].figure in LEAST
            target = best / TARGET if least else best * TARGET
        rows = [_row(entry, _reference(entry, done), memory, target) for entry in self.entries]
        metric = done[0].runs[0].figure if done else None
        _mark(rows, memory, metric in LEAST)
        return {
            "razorctl": razorctl.__version__,
            "model": self.model,
            "dataset": self.dataset,
            "metric": metric,
            "devices": sorted({result["device"] for result in runs}),
            "shared": _shared([result["job"] for result in runs]),
            "memory": memory,
            "target": target,
            "seeds": sorted({result["job"]["seed"] for result in runs}),
            "rows": rows,
            "pareto": [row["label"] for row in rows if row["pareto"]],
            "best": {
                name: [row["label"] for row in rows if name in row["best"]]
                for name in (memory, *COSTS, *GAINS)
            },
        }


def _shared(jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The settings that all jobs have in common."""
    first = jobs[0] if jobs else {}
    return {k: v for k, v in first.items() if all(job.get(k) == v for job in jobs)}


def read(directory: Path) -> FinishedRun:
    """The finished run in a directory that `finetune` has written.

    Raises UsageError if the run is not finished or was made by another version of razorctl, and
    DataError if its files are damaged.
    """
    known = read_toml(directory / CONFIG).get("environment", {}).get("razorctl")
    if known != razorctl.__version__:
        raise UsageError(
            f"{directory} was run by razorctl {known}, not {razorctl.__version__}; run it again."
        )
    try:
        result = json.loads((directory / RESULT).read_text("utf-8"))
        lines = (directory / METRICS).read_text("utf-8").splitlines()
        run = FinishedRun(directory, result, [json.loads(line) for line in lines])
        whole = len(run.steps) == result["steps"] and run.best >= 0
    except FileNotFoundError:
        raise UsageError(
            f"{directory} holds no finished run; leave it out, or run it again with "
            f"`razorctl --config {directory / CONFIG} finetune`."
        ) from None
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise DataError(f"{directory} is damaged; leave it out, or run it again.")
    return run


def is_run(directory: Path) -> bool:
    """Whether `finetune` has written to the directory, finished or not."""
    return (directory / METRICS).exists()


def is_grid(directory: Path) -> bool:
    """Whether `compare` has written to the directory."""
    return (directory / SETTINGS).exists()


def recipe_of(name: str, ratio: float) -> Recipe:
    """The recipe of a name in NAMES; raises UsageError for a ratio that cannot be used."""
    method = name if name in METHODS else "full"
    return Recipe(method, ratio, attention=BASELINES.get(name, "auto"))  # type: ignore[arg-type]


def of_grid(
    directory: Path, methods: Iterable[str] | None = None, seeds: Iterable[int] | None = None
) -> Comparison:
    """The comparison that `compare` has written to a directory, for these methods and seeds.

    None means all of them. A run that failed, is not finished or cannot be read is one of its
    entry's failures. Raises DataError if the settings are not as `compare` wrote them.
    """
    settings = read_toml(directory / SETTINGS)
    try:
        job, runs, ratio = settings["job"], settings["runs"], settings["recipe"]["ratio"]
        seeds = list(runs["seeds"] if seeds is None else seeds)
        entries = [
            Entry(name, name, recipe_of(name, ratio))
            for name in (runs["methods"] if methods is None else methods)
        ]
        comparison = Comparison(job["model"], job["dataset"], entries)
    except (KeyError, TypeError, UsageError):
        raise DataError(f"{directory / SETTINGS} is damaged; compare again.") from None
    for entry in entries:
        for seed in seeds:
            try:
                entry.runs.append(_cell(directory, entry.method, seed))
            except RazorError as error:
                entry.failures[seed] = error
    return comparison


def _cell(grid: Path, method: str, seed: int) -> FinishedRun:
    """The finished run of a method and seed in a grid; else raises the error it failed with."""
    directory = grid / f"{method}-{seed}"
    if (directory / RESULT).exists():
        return read(directory)
    try:
        known = json.loads((directory / FAILURE).read_text("utf-8"))
        error = RazorError(str(known["error"]))
        error.exit_code = int(known["exit_code"])
    except (OSError, ValueError, KeyError, TypeError):
        error = RazorError(f"not finished; go on with --resume --out {grid}.")
    raise error


def note_failure(directory: Path, error: RazorError) -> None:
    """Writes the error of a failed run to its directory, where `of_grid` reads it."""
    directory.mkdir(exist_ok=True)
    known = {"error": str(error), "exit_code": error.exit_code}
    (directory / FAILURE).write_text(json.dumps(known), "utf-8")


def finished(directories: Iterable[Path]) -> Comparison:
    """The comparison of finished runs and grids; runs that differ only in the seed share an entry.

    A single grid gives its own comparison. Raises what `read` and `of_grid` raise, and UsageError
    if the directories are not all of one model and data set.
    """
    parts = [_part(directory) for directory in dict.fromkeys(directories)]
    first, start = parts[0]
    for directory, part in parts:
        if (part.model, part.dataset) != (start.model, start.dataset):
            raise UsageError(
                f"{directory} is of {part.model} on {part.dataset}, {first} of {start.model} on "
                f"{start.dataset}; compare runs of one task."
            )
    if len(parts) == 1 and is_grid(first):
        return start
    return replace(start, entries=_labeled(_merged(e for _, part in parts for e in part.entries)))


def _part(directory: Path) -> tuple[Path, Comparison]:
    """A directory, and the comparison of what is in it."""
    if is_grid(directory):
        return directory, of_grid(directory)
    run = read(directory)
    recipe = Recipe(**run.result["recipe"])
    entry = Entry(recipe.method, recipe.method, recipe, [run])
    return directory, Comparison(run.result["model"], run.result["dataset"], [entry])


def _merged(entries: Iterable[Entry]) -> list[Entry]:
    """The entries, with those of the same settings merged and repeated runs left out."""
    groups: dict[str, Entry] = {}
    seen: set[Path] = set()
    for entry in entries:
        runs = [run for run in entry.runs if run.directory.resolve() not in seen]
        seen.update(run.directory.resolve() for run in runs)
        if entry.runs and not runs:
            continue
        key = json.dumps([runs[0].result["device"], _settings(runs[0])] if runs else entry.label)
        known = groups.setdefault(key, replace(entry, runs=[], failures={}))
        known.runs.extend(runs)
        known.failures.update(entry.failures)
    return list(groups.values())


def _labeled(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with labels that say how they differ."""
    settings = [_settings(entry.runs[0]) for entry in entries if entry.runs]
    differing = [
        name
        for name in (settings[0] if settings else ())
        if name not in IN_LABEL and len({known[name] for known in settings}) > 1
    ]
    labeled = []
    for entry in entries:
        if entry.runs:
            known = _settings(entry.runs[0])
            recipe = Recipe(**entry.runs[0].result["recipe"])
            words = [label(recipe, known["accumulate"])]
            words += [f"{name.replace('_', ' ')} {known[name]}" for name in differing]
            entry = replace(entry, recipe=recipe, label=", ".join(words))
        labeled.append(entry)
    return labeled


def _settings(run: FinishedRun) -> dict[str, Any]:
    """The recipe and the job in one mapping, without their seeds."""
    return {k: v for k, v in (run.result["recipe"] | run.result["job"]).items() if k != "seed"}


def _reference(entry: Entry, done: Sequence[Entry]) -> Entry | None:
    """The entry of plain full fine-tuning with the same settings and device, if it was run.

    Plain means automatic attention, and no more micro-batches than any entry of those settings.
    """
    if not entry.runs:
        return None
    alike = [other for other in done if other.settings == entry.settings]
    fewest = min(other.accumulate for other in alike)
    for other in alike:
        exact = other.recipe.method == "full" and not other.recipe.approximates
        if exact and other.recipe.attention == "auto" and other.accumulate == fewest:
            return other
    return None


def _row(entry: Entry, full: Entry | None, memory: str, target: float | None) -> dict[str, Any]:
    results = [run.result for run in entry.runs]
    ratio = entry.recipe.ratio if METHODS[entry.recipe.method].has_ratio else None
    row: dict[str, Any] = {
        "method": entry.method,
        "ratio": ratio,
        "joint_budget": entry.recipe.joint_budget,
        "attention": entry.recipe.attention,
        "saved_bytes": _largest(results, "saved_bytes"),
        "peak_bytes": _largest(results, "peak_bytes"),
        "step_seconds": _median(results, "step_seconds"),
        "epoch_seconds": _median(results, "epoch_seconds"),
        "accuracy": fmean(r["accuracy"] for r in results) if results else None,
        "accuracy_std": stdev(r["accuracy"] for r in results) if len(results) > 1 else None,
        "memory_vs_full": None,
        "speedup_vs_full": None,
        "time_to_target": None,
        "error": entry.error,
        "label": entry.label,
        "accumulate": entry.accumulate if entry.runs else None,
        "score": fmean(run.score for run in entry.runs) if results else None,
        "score_std": stdev(run.score for run in entry.runs) if len(results) > 1 else None,
        "seeds": [result["job"]["seed"] for result in results],
        "accuracies": [result["accuracy"] for result in results],
        "run_dirs": [str(run.directory) for run in entry.runs],
        "compiled": all(result["compiled"] for result in results) if results else None,
    }
    if full is not None:
        dense = [run.result for run in full.runs]
        row["memory_vs_full"] = row[memory] / _largest(dense, memory)
        row["speedup_vs_full"] = _median(dense, "step_seconds") / row["step_seconds"]
    if target is not None:
        times = [run.time_to(target) for run in entry.runs]
        reached = [time for time in times if time is not None]
        row["time_to_target"] = median(reached) if times and reached == times else None
    return row


def _largest(results: Sequence[Mapping[str, Any]], name: str) -> Any:
    values = [result[name] for result in results]
    return max(values) if values and None not in values else None


def _median(results: Sequence[Mapping[str, Any]], name: str) -> Any:
    known = [result[name] for result in results if result[name] is not None]
    return median(known) if known else None


def _mark(rows: Sequence[dict[str, Any]], memory: str, least: bool) -> None:
    """Adds to each row its `best` columns and whether it is on the Pareto front.

    least: whether less is better of scores.
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
    """For each point, whether no other point is at most equal in all numbers and less in one."""
    return [
        not any(q != p and all(b <= a for a, b in zip(p, q, strict=True)) for q in points)
        for p in points
    ]
