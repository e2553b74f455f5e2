"""`razorctl compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from razorctl.cli import effects, planning
from razorctl.cli.options import OF_DATA, Device, Json, option, takes
from razorctl.cli.settings import Settings, read
from razorctl.cli.views import common as views
from razorctl.cli.views import comparison as view
from razorctl.errors import UsageError
from razorctl.ops.cpu import build
from razorctl.recipe import Recipe

if TYPE_CHECKING:
    from razorctl.training.comparison import Comparison

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
OF_VIEW = {"what", "target", "json", "csv"}  # parameters that also apply to finished runs


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
    **flags: Any,
) -> None:
    """Compare methods on MODEL and DATASET, or compare the finished runs in directories.

    Each directory is that of a run or of a comparison. Every method and seed is
    run by `finetune` in its own process; the row of a run that fails shows the
    error. Only the ratio of a recipe can be set: every other setting is the
    method's default. full-stored and full-flash are full with stored or flash
    attention; accumulate is full with the fewest micro-batches that bring its
    peak to razor's or below.
    """
    if json and csv:
        raise UsageError("json and csv cannot both be printed; give one of them.")
    if target is not None and not target > 0:
        raise UsageError(f"target {target:g} is not above 0; give an accuracy such as 0.95.")
    found = _finished(ctx, what)
    if found is None:
        if resume and out is None:
            raise UsageError("there is nothing to resume; name the comparison with --out.")
        settings = read(ctx, flags | dict(zip(("model", "dataset"), what, strict=True)))
        grid = {"seeds": seeds, "device": device, "out": out, "resume": resume}
        found = _run(ctx, settings, methods.split(","), grid)
    from razorctl.training import rows

    document = rows.document(found, target)
    if target is not None and target > 1 and document["metric"] != "perplexity":
        raise UsageError(f"target {target:g} is above 1; {document['metric']} is a share, as 0.95.")
    if json:
        views.print_json(document)
    elif csv:
        view.print_csv(document["rows"])
    else:
        view.show(document)
    raise typer.Exit(found.exit_code)


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
) -> "Comparison":
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
    return grid.comparison
