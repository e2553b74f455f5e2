"""`razorctl compare`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from razorctl.cli import effects, planning
from razorctl.cli.options import OF_DATA, Device, Json, option, takes
from razorctl.cli.settings import Settings, read
from razorctl.cli.views import common as views
from razorctl.cli.views import comparison as view
from razorctl.cli.views import report
from razorctl.errors import UsageError
from razorctl.ops.cpu import build
from razorctl.recipe import Recipe
from razorctl.training import rundir
from razorctl.training.budget import seconds

if TYPE_CHECKING:
    from razorctl.training.comparison import Comparison
    from razorctl.training.grid import Grid

OF_JOB = (
    "steps",
    "epochs",
    "input_size",
    "batch_size",
    "precision",
    "optimizer",
    "learning_rate",
    "weight_decay",
    "evaluate_every",
    "compile",
    "cuda_graphs",
    *OF_DATA,
)
OF_VIEW = {"what", "target", "json", "csv", "html"}  # parameters that also apply to finished runs


@takes("ratio", *OF_JOB)
def compare(
    ctx: typer.Context,
    what: Annotated[
        list[str], typer.Argument(metavar="MODEL DATASET | DIR...", show_default=False)
    ],
    methods: Annotated[
        str, option(help="Names of methods, or full-stored, full-flash, accumulate.")
    ] = "full,checkpoint,backrazor,prebackrazor++,razor",
    seeds: Annotated[int, option(help="Runs of each method.")] = 1,
    budget: Annotated[
        str | None,
        option(help="Time of training for all runs together, such as 10m, instead of --steps."),
    ] = None,
    target: Annotated[
        float | None, option(help="Accuracy to reach. [default: 99 % of full's best]")
    ] = None,
    device: Device = None,
    out: Annotated[Path | None, option(help="New directory. [default: under runs/]")] = None,
    resume: Annotated[
        bool, option("--resume", help="Continue in --out; finished runs are not run again.")
    ] = False,
    json: Json = False,
    csv: Annotated[bool, option("--csv", help="Print the rows as CSV.")] = False,
    html: Annotated[Path | None, option(help="New file for a report with plots.")] = None,
    **flags: Any,
) -> None:
    """Compare methods on MODEL and DATASET, or compare the finished runs in directories.

    Each directory is that of a run or of a comparison. Every method and seed is
    run by `finetune` in its own process; the row of a run that fails shows the
    error. Only the ratio of a recipe can be set: every other setting is the
    method's default. full-stored and full-flash are full with stored or flash
    attention; accumulate is full with the fewest micro-batches that bring its
    peak to razor's or below.

    --budget divides its time equally: a few steps of each method are timed, then
    each method has as many steps as fit in its share, and a learning rate that
    ends with them. --html writes all figures, plots and commands to one file that
    needs no network. With --resume it replaces the file.
    """
    if json and csv:
        raise UsageError("json and csv cannot both be printed; give one of them.")
    if target is not None and not target > 0:
        raise UsageError(f"target {target:g} is not above 0; give an accuracy such as 0.95.")
    if html is not None:
        rundir.check_room(html, "--html", replace=resume)
    found, directories = _finished(ctx, what), [Path(name) for name in what]
    if found is None:
        if resume and out is None:
            raise UsageError("there is nothing to resume; name the comparison with --out.")
        settings = read(ctx, flags | dict(zip(("model", "dataset"), what, strict=True)))
        limit = None if budget is None else seconds(budget)
        grid = {"seeds": seeds, "seconds": limit, "device": device, "out": out, "resume": resume}
        made = _run(ctx, settings, methods.split(","), grid)
        found, directories = made.comparison, [made.out]
    from razorctl.training import rows

    document = rows.document(found, target)
    if target is not None and target > 1 and document["metric"] != "perplexity":
        raise UsageError(f"target {target:g} is above 1; {document['metric']} is a share, as 0.95.")
    try:
        if html is not None:
            _report(html, document, found, directories, target)
    finally:
        if json:
            views.print_json(document)
        elif csv:
            view.print_csv(document["rows"])
        else:
            view.show(document)
    raise typer.Exit(found.exit_code)


def _report(
    html: Path,
    document: dict[str, Any],
    found: "Comparison",
    directories: list[Path],
    target: float | None,
) -> None:
    """Writes the report of what is in the directories; raises UsageError if it cannot be."""
    from razorctl.training import comparison

    grids = [comparison.repeating(each) for each in directories if comparison.is_grid(each)]
    words = ["razorctl", "compare", *map(str, directories)]
    words += [] if target is None else ["--target", f"{target:g}"]
    again = shlex.join([*words, "--html", html.name])
    commands = [("All runs again", grids), ("This report again", [again])]
    try:
        report.write(html, document, found, commands)
    except OSError as error:
        raise rundir.cannot_write(html, "--html", error) from None
    views.say(f"report: {html}")


def _finished(ctx: typer.Context, what: list[str]) -> "Comparison | None":
    """The comparison of the directories that `what` names; None for a model and a data set.

    Raises UsageError if `what` is neither, or if an option does not apply to finished runs.
    """
    from razorctl.training import comparison

    there = [comparison.is_run(Path(name)) or comparison.is_grid(Path(name)) for name in what]
    if all(there):
        for name in (name for name in ctx.params if name not in OF_VIEW):
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                raise UsageError(
                    f"{name.replace('_', ' ')} does not apply to finished runs; leave it out."
                )
        return comparison.finished(map(Path, what))
    if len(what) != 2 or any(there):
        raise UsageError(
            f"{what[there.index(False)]} is not the directory of a run or a comparison; name "
            "either a model and a data set, or only such directories."
        )
    return None


def _run(
    ctx: typer.Context, settings: Settings, methods: list[str], options: dict[str, Any]
) -> "Grid":
    """Runs the methods on the job of `settings`; `options` are arguments of `Grid`."""
    job = settings.job
    planning.say_data(job)
    build.start(options["device"])
    with views.waiting(f"preparing to compare on {job.model} and {job.dataset}"):
        from razorctl.cli import progress
        from razorctl.training.grid import Grid

        grid = Grid(job, methods, ratio=settings.given.get("ratio", Recipe.ratio), **options)
    effects.note_settings(ctx, *grid.recipes.values())
    effects.note_settings(ctx, grid.resolved)
    progress.compare(grid)
    return grid
