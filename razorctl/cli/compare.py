"""`razorctl compare`."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from razorctl.cli.options import (
    DATA_SETTINGS,
    Device,
    Json,
    evaluation_option,
    option,
    with_options,
)
from razorctl.cli.settings import Call, given_settings, is_given, is_typed, print_result
from razorctl.cli.views import common as views
from razorctl.config.tasks import LEAST
from razorctl.errors import UsageError
from razorctl.registry import unknown

# What --help does not need is imported in the functions below.
if TYPE_CHECKING:
    from razorctl.training.comparing.comparison import Comparison
    from razorctl.training.comparing.grid import Grid

JOB_SETTINGS = (
    *("steps", "epochs", "input_size", "batch_size", "precision", "optimizer", "learning_rate"),
    *("weight_decay", "layer_decay", "momentum", "warmup_steps", "clip_norm", "ema", "freeze"),
    *("label_smoothing", "class_weights", "workers", "evaluate_every", "compile", "cuda_graphs"),
    *("task", "metric", "weights"),
    *DATA_SETTINGS,
)
METHODS = "full,checkpoint,backrazor,prebackrazor++,razor"
VIEWING = {"what", "target", "json", "csv", "html"}  # parameters that also apply to finished runs
FIRST = (
    *("methods", "seeds", "ratio", "budget", "steps", "epochs"),
    *("out", "resume", "html", "csv", "json"),
)


@dataclass(frozen=True)
class ComparedRuns:
    """The result of `compare`, and the directories of its runs."""

    document: dict[str, Any]
    comparison: "Comparison"
    directories: Sequence[Path]


@with_options("ratio", *JOB_SETTINGS, first=FIRST, planned=False, listed=True)
def compare(
    ctx: typer.Context,
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL DATASET | DIR...",
            help="A model and a data set, or directories of runs and comparisons.",
            show_default=False,
        ),
    ],
    methods: Annotated[
        str, option(help="Names of methods or baselines (see below).", metavar="NAMES")
    ] = METHODS,
    seeds: Annotated[int, option(help="Runs of each method.", metavar="N")] = 1,
    budget: Annotated[
        str | None,
        option(
            help="Time after which no new run starts, such as 10m.",
            default="none",
            metavar="TIME",
        ),
    ] = None,
    target: Annotated[
        float | None,
        evaluation_option(
            help="Score to reach, such as an accuracy of 0.95.",
            default="99 % of full's best",
            metavar="SCORE",
        ),
    ] = None,
    device: Device = None,
    out: Annotated[
        Path | None, option(help="New directory.", default="under runs/", metavar="DIR")
    ] = None,
    resume: Annotated[
        bool,
        option("--resume", help="Continue in --out; finished runs are not run again.", metavar=""),
    ] = False,
    json: Json = False,
    csv: Annotated[bool, option("--csv", help="Print the rows as CSV.", metavar="")] = False,
    html: Annotated[
        Path | None,
        option(help="New file for a report with plots.", default="none", metavar="FILE"),
    ] = None,
    **flags: Any,
) -> ComparedRuns:
    """Compare methods on MODEL and DATASET, or compare the finished runs in directories.

        razorctl compare vit-b16 ./photos --methods full,razor --html report.html

    Each DIR is the directory of a run or of a comparison. Every method and seed
    is run by `finetune` in its own process; if a run fails, its row shows the
    error. Only the ratio of a recipe can be set; every other setting is the
    method's default.

    Baselines are methods with other settings: full-stored and full-flash are full
    with stored or flash attention. accumulate is full with the fewest
    micro-batches that bring its peak to razor's or below. full-compiled is full
    with --compile, and activation-memory-budget is that with a tenth of the
    activations kept. razor-compiled, razor-checkpoint
    (--activation-checkpointing), razor-lora (--lora), razor-branches (half of the
    residual branches in a step) and razor-int8-forward are razor with one more
    option.

    Any option that is a number may be a list, such as --lr 1e-5,3e-5,1e-4: each
    method is run with every value, and the last line has the command of the best.

    After the time of --budget no new run starts, but the current one ends; --resume
    goes on with the others. --html writes all figures, plots and commands to one
    file, which needs no network; with --resume it replaces an existing file.
    """
    from razorctl.cli.views import comparison as view

    if json and csv:
        raise UsageError("json and csv cannot both be printed; give one of them.")
    _check(target, html, resume)
    comparison, directories = _finished(ctx, what), [Path(name) for name in what]
    if comparison is None:
        options = {"seeds": seeds, "device": device, "out": out, "resume": resume}
        grid = _run_grid(ctx, what, methods.split(","), flags, options, budget)
        comparison, directories = grid.comparison, [grid.out]
    runs = ComparedRuns(_document(comparison, target), comparison, directories)
    try:
        if html is not None:
            _write_report(html, runs, target, resume)
    finally:
        if csv:
            view.print_csv(runs.document["rows"])
        else:
            print_result(ctx, runs.document, view.show)
    if is_typed(ctx):
        raise typer.Exit(comparison.exit_code)
    return runs


def seconds_of(budget: str) -> float:
    """The seconds of a text such as 90s, 10m or 1.5h; raises UsageError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([smh])", budget.strip())
    if match is None or not float(match[1]):
        raise UsageError(f"budget {budget!r} is no time; give one such as 90s, 10m or 1.5h.")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def _check(target: float | None, html: Path | None, resume: bool) -> None:
    """Raises UsageError for a target or a report that cannot be."""
    if target is not None and not target > 0:
        raise UsageError(f"target {target:g} is not above 0; give an accuracy such as 0.95.")
    if html is not None:
        from razorctl.system import atomic

        atomic.check_room(html, "--html", replace=resume)


def _document(comparison: "Comparison", target: float | None) -> dict[str, Any]:
    """The document of a comparison; raises UsageError for a target that its metric cannot have."""
    from razorctl.training.comparing import figures

    document = figures.document(comparison, target)
    if target is not None and target > 1 and document["metric"] not in LEAST:
        raise UsageError(
            f"target {target:g} is above 1; {document['metric']} is at most that, like 0.95."
        )
    return document


def _write_report(html: Path, runs: ComparedRuns, target: float | None, replace: bool) -> None:
    """Writes the report of a comparison; raises UsageError if it cannot be written."""
    from razorctl.cli.views import report
    from razorctl.training.comparing import comparison

    grids = [comparison.repeating(each) for each in runs.directories if comparison.is_grid(each)]
    words = ["razorctl", "compare", *map(str, runs.directories)]
    if target is not None:
        words += ["--target", f"{target:g}"]
    again = shlex.join([*words, "--html", str(html)])
    commands = [("Repeat all runs", grids), ("Repeat this report", [again])]
    try:
        report.write(html, runs.document, runs.comparison, commands, replace)
    except OSError as error:
        raise UsageError(
            f"cannot write {html} ({error.strerror}), but the runs are kept; make room, then "
            f"`{again}`."
        ) from None
    views.say(f"report: {html}")


def _finished(ctx: Call, what: list[str]) -> "Comparison | None":
    """The comparison of the directories that `what` names; None for a model and a data set.

    Raises UsageError if `what` is neither, or if an option does not apply to finished runs.
    """
    from razorctl.training.comparing import comparison
    from razorctl.training.rundir import is_run

    exist = [is_run(Path(name)) or comparison.is_grid(Path(name)) for name in what]
    if all(exist):
        for name in (name for name in ctx.params if name not in VIEWING):
            if is_given(ctx, name, ["COMMANDLINE"]):
                raise UsageError(
                    f"{name.replace('_', ' ')} does not apply to finished runs; leave it out."
                )
        return comparison.of_directories(map(Path, what))
    if len(what) != 2 or any(exist):
        raise UsageError(
            f"{what[exist.index(False)]} is not the directory of a run or a comparison; name "
            "either MODEL and DATASET, or only such directories."
        )
    return None


def _run_grid(
    ctx: Call,
    what: list[str],
    methods: list[str],
    flags: dict[str, Any],
    options: dict[str, Any],
    budget: str | None,
) -> "Grid":
    """Runs the methods on a model and a data set; `options` are keywords of `Grid`."""
    if options["resume"] and options["out"] is None:
        raise UsageError("there is nothing to resume; name the comparison with --out.")
    from razorctl.cli import effects, planning
    from razorctl.config.recipe import Recipe
    from razorctl.system import c_compiler
    from razorctl.training import rundir
    from razorctl.training.comparing.comparison import NAMES
    from razorctl.training.comparing.variants import lists_of

    flags, lists = lists_of(flags)
    settings = given_settings(ctx, flags | dict(zip(("model", "dataset"), what, strict=True)))
    options["seconds"] = None if budget is None else seconds_of(budget)
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
        grid = Grid(job, methods, ratio=ratio, lists=lists, **options)
    effects.note_settings(ctx, *grid.commands.recipes.values())
    effects.note_settings(ctx, grid.commands.resolved)
    progress.run_grid(grid)
    return grid
