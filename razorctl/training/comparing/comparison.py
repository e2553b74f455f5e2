"""Finished runs side by side, read from the directories of runs and of grids."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.config.settings import read_toml
from razorctl.errors import RazorError, UsageError
from razorctl.methods import METHODS
from razorctl.planning.candidates import label
from razorctl.planning.plan import FLAGS
from razorctl.system import documents
from razorctl.system.atomic import atomic_file
from razorctl.training.comparing.finished_run import FinishedRun, read_run
from razorctl.training.comparing.variants import command, rows_of
from razorctl.training.rundir import RESULT, is_marked
from razorctl.training.schemas import Failure, GridSettings

# Baseline -> the settings of recipe and job that it changes. The default method is `full`, and the
# micro-batches of ACCUMULATING depend on the model.
BASELINES: dict[str, dict[str, Any]] = {
    "full-stored": {"attention": "stored"},
    "full-flash": {"attention": "flash"},
    "accumulate": {},
    "gradcache": {},
    "full-compiled": {"compile": True},
    "activation-memory-budget": {"compile": True, "activation_memory_budget": 0.1},
    "razor-compiled": {"method": "razor", "compile": True},
    "razor-checkpoint": {"method": "razor", "activation_checkpointing": True},
    "razor-lora": {"method": "razor", "lora": True},
    "razor-branches": {"method": "razor", "joint_budget": 0.5, "joint": "branches"},
    "razor-int8-forward": {"method": "razor", "int8_forward": True},
}
NAMES = (*METHODS, *BASELINES)
ACCUMULATING = ("accumulate", "gradcache")  # of which an embedding has the second, others the first
# Files in the directory of a grid, and in the directory of a failed run.
SETTINGS, FAILURE = "comparison.toml", "failure.json"
MARK = re.compile(rb"^\[runs\]\s*$", re.MULTILINE)  # in SETTINGS

OF_LENGTH = ("steps", "warmup_steps", "evaluate_every")  # settings that follow from a run's length
OF_BASELINES = ("accumulate", "compile", "activation_memory_budget")  # settings of a job
IN_LABEL = (  # settings that `candidates.label` names
    *("method", "ratio", "joint_budget", "joint", "attention", "int8_forward"),
    *("activation_checkpointing", "lora"),
    *OF_BASELINES,
)


@dataclass(frozen=True)
class Entry:
    """The runs of one row, which differ only in their seeds.

    method: one of NAMES. label: distinguishes the row from the others. failures: seed -> the error
    of the run. values: setting -> value, for the settings that a grid has lists of. command: trains
    like this row; None outside a grid.
    """

    method: str
    label: str
    recipe: Recipe
    runs: list[FinishedRun] = field(default_factory=list)
    failures: dict[int, RazorError] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    command: str | None = None

    @property
    def settings(self) -> tuple[Any, ...]:
        """The device and the job of the runs, without seed, length and settings of rows."""
        ignored = ("seed", *OF_BASELINES, *OF_LENGTH, *self.values)
        job = {name: value for name, value in self.job.items() if name not in ignored}
        return self.runs[0].result["device"], job

    @property
    def job(self) -> dict[str, Any]:
        """The job of the runs; empty without one."""
        job: dict[str, Any] = self.runs[0].result["job"] if self.runs else {}
        return job

    @property
    def effort(self) -> tuple[bool, bool, int]:
        """The settings of a job that baselines raise."""
        job = self.job
        return job["compile"], job["activation_memory_budget"] is not None, job["accumulate"]

    @property
    def error(self) -> str | None:
        """Why runs of this entry are missing; None if none is missing."""
        if not self.failures:
            return None
        sentence = str(next(iter(self.failures.values())))
        return f"seed {', '.join(map(str, self.failures))}: {sentence}" if self.runs else sentence


@dataclass(frozen=True)
class Comparison:
    """The entries that are compared, all of one model and data set; some have no finished run."""

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


def is_grid(directory: Path) -> bool:
    """Whether a directory is a grid that `compare` wrote."""
    return is_marked(directory / SETTINGS, MARK)


def recipe_by_name(name: str, ratio: float) -> Recipe:
    """The recipe of a name in NAMES; raises UsageError for a wrong ratio."""
    settings: dict[str, Any] = {"ratio": ratio, "method": name if name in METHODS else "full"}
    settings |= BASELINES.get(name, {})
    return Recipe(
        **{each.name: settings[each.name] for each in fields(Recipe) if each.name in settings}
    )


def of_grid(
    directory: Path, methods: Iterable[str] | None = None, seeds: Iterable[int] | None = None
) -> Comparison:
    """The comparison in the directory of a grid, for these methods and seeds; None is all.

    A run that failed, is not finished or cannot be read is among the failures of its entry. Raises
    DataError if the settings are not as `compare` wrote them.
    """
    settings = settings_of(directory)
    job, runs, ratio = settings["job"], settings["runs"], settings["recipe"]["ratio"]
    seeds = list(runs["seeds"] if seeds is None else seeds)
    methods = list(runs["methods"] if methods is None else methods)
    entries = list[Entry]()
    for row in rows_of(methods, runs.get("lists") or {}, lambda name: recipe_by_name(name, ratio)):
        recipe = recipe_by_name(row.method, dict(row.values).get("ratio", ratio))
        entry = Entry(row.method, row.label, recipe, values=dict(row.values))
        for seed in seeds:
            try:
                entry.runs.append(_cell(directory, directory / f"{row.name}-{seed}"))
            except RazorError as error:
                entry.failures[seed] = error
        changes = {**BASELINES.get(row.method, {}), **entry.values}
        if row.method in ACCUMULATING and entry.runs:
            changes["accumulate"] = entry.job["accumulate"]
        entries.append(replace(entry, command=command(Job(**job), recipe, changes)))
    return Comparison(job["model"], job["dataset"], entries)


def repeating(directory: Path) -> str:
    """The command that repeats the grid of a directory in a new directory.

    Raises DataError if the settings are not as `compare` wrote them.
    """
    settings = settings_of(directory)
    job, runs = settings["job"], settings["runs"]
    words = ["--config", str(directory / SETTINGS), "compare", job["model"], job["dataset"]]
    words += ["--methods", ",".join(runs["methods"]), "--seeds", str(len(runs["seeds"]))]
    for name, values in (runs.get("lists") or {}).items():
        flag = FLAGS.get(name, name.replace("_", "-"))
        words += [f"--{flag}", ",".join(f"{value}" for value in values)]
    device = settings.get("environment", {}).get("device")
    if device is not None:
        words += ["--device", device]
    return shlex.join(["razorctl", *words])


def settings_of(directory: Path) -> dict[str, Any]:
    """The settings of a grid; raises DataError if they are not as `compare` wrote them."""
    settings = read_toml(directory / SETTINGS)
    documents.check_tables(settings, GridSettings, directory / SETTINGS, "compare again")
    return settings


def _cell(grid: Path, directory: Path) -> FinishedRun:
    """The finished run in a directory of a grid; raises the error of a failed run."""
    if (directory / RESULT).exists():
        return read_run(directory)
    failure = documents.read_cached(directory / FAILURE, Failure)
    error = RazorError(f"not finished; continue with --resume --out {grid}.")
    if failure is not None:
        error = RazorError(failure["error"])
        error.exit_code = failure["exit_code"]
    raise error


def note_failure(directory: Path, error: RazorError) -> None:
    """Writes the error of a failed run to its directory, where `of_grid` reads it."""
    failure = {"error": str(error), "exit_code": error.exit_code}
    with suppress(OSError):  # the run then counts as not finished
        directory.mkdir(parents=True, exist_ok=True)
        with atomic_file(directory / FAILURE, replace=True) as file:
            file.write_text(documents.text(failure), "utf-8")


def of_directories(directories: Iterable[Path]) -> Comparison:
    """The comparison of finished runs and grids; runs that differ only in the seed share an entry.

    Raises what `read_run` and `of_grid` raise, and UsageError for several models or data sets.
    """
    parts = [_part(directory) for directory in dict.fromkeys(directories)]
    first, start = parts[0]
    for directory, part in parts:
        if (part.model, part.dataset) != (start.model, start.dataset):
            raise UsageError(
                f"{directory} is of {part.model} on {part.dataset}, {first} of {start.model} on "
                f"{start.dataset}; compare runs of one model and data set."
            )
    if len(parts) == 1 and is_grid(first):
        return start
    entries = _labeled(_merged(e for _, part in parts for e in part.entries))
    if len({run.figure for entry in entries for run in entry.runs}) > 1:
        for entry in entries:
            entry.runs[:] = [replace(run, together=True) for run in entry.runs]
    return replace(start, entries=entries)


def _part(directory: Path) -> tuple[Path, Comparison]:
    """A directory, and the comparison of its run or its grid."""
    if is_grid(directory):
        return directory, of_grid(directory)
    run = read_run(directory)
    recipe = Recipe(**run.result["recipe"])
    entry = Entry(recipe.method, recipe.method, recipe, [run])
    return directory, Comparison(run.result["model"], run.result["dataset"], [entry])


def _merged(entries: Iterable[Entry]) -> list[Entry]:
    """The entries; entries of the same settings are merged, and repeated runs are left out."""
    groups: dict[str, Entry] = {}
    directories: set[Path] = set()
    for entry in entries:
        runs = [run for run in entry.runs if run.directory.resolve() not in directories]
        directories.update(run.directory.resolve() for run in runs)
        if entry.runs and not runs:
            continue
        key = documents.text(
            [runs[0].result["device"], _settings(runs[0])] if runs else entry.label
        )
        group = groups.setdefault(key, replace(entry, runs=[], failures={}))
        group.runs.extend(runs)
        group.failures.update(entry.failures)
    return list(groups.values())


def _labeled(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with labels that name the settings in which they differ."""
    settings = [_settings(entry.runs[0]) for entry in entries if entry.runs]
    differing = [
        name
        for name in (settings[0] if settings else ())
        if name not in IN_LABEL and len({each[name] for each in settings}) > 1
    ]
    compiling_differs = len({tuple(_compiling(each)) for each in settings}) > 1
    labeled = []
    for entry in entries:
        if entry.runs:
            of_entry = _settings(entry.runs[0])
            recipe = Recipe(**entry.runs[0].result["recipe"])
            words = [label(recipe, of_entry["accumulate"])]
            if compiling_differs:
                words += _compiling(of_entry)
            words += [f"{name.replace('_', ' ')} {of_entry[name]}" for name in differing]
            entry = replace(entry, recipe=recipe, label=", ".join(words))
        labeled.append(entry)
    return labeled


def _compiling(job: Mapping[str, Any]) -> list[str]:
    """The settings of compiling, in words; none if steps are not compiled."""
    budget = job["activation_memory_budget"]
    words = [] if budget is None else [f"activation memory budget {budget:g}"]
    return ["compiled", *words] if job["compile"] else []


def _settings(run: FinishedRun) -> dict[str, Any]:
    """The settings of recipe and job in one mapping, without seeds."""
    return {k: v for k, v in (run.result["recipe"] | run.result["job"]).items() if k != "seed"}
