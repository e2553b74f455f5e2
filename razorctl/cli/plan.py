"""`razorctl plan`."""

from functools import partial
from typing import Annotated, Any

import typer

from razorctl.cli.options import JOB, MODEL, PLANNING, RECIPE, Json, Preset, option, with_options
from razorctl.cli.settings import given_settings, print_result
from razorctl.errors import NoFitError

JOB_SETTINGS = [name for name in JOB if name != "accumulate"]  # which the plan chooses
FIRST = (
    *("gpu", "vram", "prefer", "batch_size", "precision", "optimizer", "method", "ratio"),
    *("max_ratio", "explain", "json"),
)


@with_options(*PLANNING, *RECIPE, *JOB_SETTINGS, first=FIRST)
def plan(
    ctx: typer.Context,
    model: Annotated[str, MODEL] = "vit-b16",
    recipe: Preset = None,
    explain: Annotated[
        bool, option("--explain", help="Explain the choice step by step.", metavar="")
    ] = False,
    json: Json = False,
    **flags: Any,
) -> dict[str, Any]:
    """Show the ways to train MODEL on DATASET on a card, what each needs, and which one to take.

        razorctl plan vit-b16 cifar100 --gpu rtx-4090

    Training steps are traced without a GPU. The table lists exact and approximate
    ways. With a method or any other setting of a recipe, only that recipe is
    planned.
    """
    from razorctl.cli import effects, planning  # imported here: --help needs none of them
    from razorctl.cli.views import plan as view

    settings = given_settings(ctx, flags | {"model": model}, recipe)
    if "dataset" not in settings.given:
        from razorctl import data, models

        with planning.lookup_status(settings.given["model"]):
            entry = models.named(settings.given["model"])
        task = settings.given.get("task", entry.tasks[0])
        settings = settings.but(dataset=data.usual(task, entry.modality))
    planning.check_data(planning.check_names(settings))
    try:
        result = planning.plan(settings, quiet=json)
    except NoFitError as error:
        print_result(ctx, dict(error.document), view.show_ways)
        raise
    effects.note_settings(ctx, result.planned_recipe)
    effects.note_settings(ctx, result.planned_job)
    document = result.document()
    print_result(ctx, document, partial(view.show, explain=explain))
    return document
