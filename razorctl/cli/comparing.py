"""A comparison of `compare`: runs of methods, or finished runs in directories, and a report."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.cli.settings import Call
from razorctl.cli.views import common as views
from razorctl.config.tasks import LEAST
from razorctl.errors import NoFitError, UsageError, first_line
from razorctl.registry import unknown

# Functions below import what a refused call does not need.
if TYPE_CHECKING:
    from razorctl.training.comparing.comparison import Comparison
    from razorctl.training.comparing.grid import Grid

METHODS = "full,checkpoint,backrazor,prebackrazor++,razor"
# Options of new runs with their defaults; they do not apply to finished runs.
OPTIONS = {
    **dict.fromkeys(("budget", "device", "out")),
    "methods": METHODS,
    "seeds": 1,
    "resume": False,
}


@dataclass(frozen=True)
class ComparedRuns:
    """The result of `compare`, and the directories of its runs."""

    document: dict[str, Any]
    comparison: "Comparison"
    directories: Sequence[Path]

    @property
    def exit_code(self) -> int:
        """That of the comparison, or of NoFitError if no row with a result fits the memory."""
        fits = {row["fits"] for row in self.document["rows"] if row["seeds"]}
        misfit = False in fits and True not in fits
        return self.comparison.exit_code or (NoFitError.exit_code if misfit else 0)


def compare(
    call: Call,
    what: list[str],
    options: Mapping[str, Any],
    *,
    target: float | None,
    vram: str | None,
    gpu: str | None,
    html: Path | None,
) -> ComparedRuns:
    """Compares methods on a model and a data set, or finished runs; writes a report to `html`.

    what: names of a model and a data set, or directories. options: as of `api.compare` in
    OPTIONS. Raises UsageError, which has the document if only the report cannot be written.
    """
    from razorctl.training.comparing.peaks import card_memory

    _check(target, html, options["resume"])
    budget = card_memory(vram, gpu)
    comparison, directories = _finished(call, what, options), [Path(name) for name in what]
    if comparison is None:
        grid = _run_grid(call, what, options)
        comparison, directories = grid.comparison, [grid.out]
    runs = ComparedRuns(_document(comparison, target, budget), comparison, directories)
    if html is not None:
        again = {"target": None if target is None else f"{target:g}", "vram": vram, "gpu": gpu}
        _write_report(html, runs, again, options["resume"])
    return runs


def seconds_of(budget: str) -> float:
    """The seconds of a text such as 90s, 10m or 1.5h; raises UsageError for other texts."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([smh])", budget.strip())
    if match is None or not float(match[1]):
        raise UsageError(f"budget {budget!r} is not a duration; give one such as 90s, 10m or 1.5h.")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def _check(target: float | None, html: Path | None, resume: bool) -> None:
    """Raises UsageError for a target that is not above 0, or a report that cannot be written."""
    if target is not None and not target > 0:
        raise UsageError(f"target {target:g} is not above 0; give an accuracy such as 0.95.")
    if html is not None:
        from razorctl.system import atomic

        atomic.check_room(html, "--html", replace=resume)


def _document(comparison: "Comparison", target: float | None, budget: int | None) -> dict[str, Any]:
    """The document of a comparison; raises UsageError for a target that no run can reach.

    budget: bytes that a row must fit. A note says why peaks are not traced.
    """
    from razorctl.training.comparing import figures, peaks

    traced: dict[str, int] = {}
    if not peaks.measured(comparison):
        with views.status("tracing peaks") as update:
            try:
                traced = peaks.traced_peaks(
                    comparison, lambda label: update(f"tracing the peak of {label}")
                )
            except Exception as error:  # a model may raise anything, and the runs are finished
                views.note(f"peaks are not traced: {first_line(error)}")
    document = figures.document(comparison, target, traced, budget)
    if target is not None and target > 1 and document["metric"] not in LEAST:
        raise UsageError(
            f"target {target:g} is above 1; {document['metric']} is at most that, like 0.95."
        )
    return document


def _write_report(
    html: Path, runs: ComparedRuns, options: Mapping[str, str | None], replace: bool
) -> None:
    """Writes the report, and in it its command with `options`; raises UsageError if it cannot."""
    from razorctl.cli.views import report
    from razorctl.training.comparing import comparison

    grids = [comparison.repeating(each) for each in runs.directories if comparison.is_grid(each)]
    words = ["razorctl", "compare", *map(str, runs.directories)]
    words += [w for name, value in options.items() if value for w in (f"--{name}", value)]
    again = shlex.join([*words, "--html", str(html)])
    commands = [("Repeat all runs", grids), ("Repeat this report", [again])]
    try:
        report.write(html, runs.document, runs.comparison, commands, replace)
    except OSError as error:
        failure = UsageError(
            f"cannot write {html} ({error.strerror}), but the runs are finished; make room, then "
            f"run `{again}`."
        )
        failure.document = runs.document
        raise failure from None
    views.say(f"report: {html}")


def exist(what: Sequence[str]) -> list[bool]:
    """For each path, whether it is the directory of a run or a comparison."""
    from razorctl.training.comparing import comparison
    from razorctl.training.rundir import is_run

    return [is_run(Path(name)) or comparison.is_grid(Path(name)) for name in what]


def _finished(call: Call, what: Sequence[str], options: Mapping[str, Any]) -> "Comparison | None":
    """The comparison of finished runs; None if `what` names a model and a data set.

    Raises UsageError if `what` names neither, or if an option does not apply to finished runs.
    """
    from razorctl.training.comparing import comparison

    exists = exist(what)
    if all(exists):
        for name in (*(n for n, value in options.items() if value != OPTIONS[n]), *call.given):
            raise UsageError(
                f"{name.replace('_', ' ')} does not apply to finished runs; leave it out."
            )
        return comparison.of_directories(map(Path, what))
    if len(what) != 2 or any(exists):
        raise UsageError(
            f"{what[exists.index(False)]} is not the directory of a run or a comparison; name "
            "either MODEL and DATASET, or only such directories."
        )
    return None


def _run_grid(call: Call, what: Sequence[str], options: Mapping[str, Any]) -> "Grid":
    """Runs the methods on a model and a data set."""
    if options["resume"] and options["out"] is None:
        raise UsageError("there is nothing to resume; name the comparison with --out.")
    from razorctl.cli import effects, planning
    from razorctl.config.recipe import Recipe
    from razorctl.system import c_compiler
    from razorctl.training import rundir
    from razorctl.training.comparing.comparison import NAMES
    from razorctl.training.comparing.variants import lists_of

    single, lists = lists_of(call.given)
    names = dict(zip(("model", "dataset"), what, strict=True))
    given = {name: value for name, value in (single | names).items() if value is not None}
    settings = replace(call, given=given).settings
    methods, budget = options["methods"].split(","), options["budget"]
    of_grid = {name: options[name] for name in ("seeds", "device", "out", "resume")}
    seconds = None if budget is None else seconds_of(budget)
    job = settings.job
    for name in methods:
        if name not in NAMES:
            raise unknown("method", name, NAMES)
    if options["out"] is not None and not options["resume"]:
        rundir.choose(options["out"])
    planning.check_data(job)
    c_compiler.start(options["device"])
    with views.status(f"preparing to compare on {job.model} and {job.dataset}"):
        from razorctl.cli import progress
        from razorctl.training.comparing.grid import Grid

        ratio = settings.given.get("ratio", Recipe.ratio)
        grid = Grid(job, methods, ratio=ratio, lists=lists, seconds=seconds, **of_grid)
    effects.note_settings(call, *grid.commands.recipes.values())
    effects.note_settings(call, grid.commands.resolved)
    progress.run_grid(grid)
    return grid
