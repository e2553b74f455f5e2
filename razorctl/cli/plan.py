"""`razorctl plan`."""

from typing import Annotated, Any

import typer

from razorctl.cli.options import JOB, MODEL, PLANNING, RECIPE, Json, Preset, option, takes
from razorctl.cli.settings import read
from razorctl.cli.views import common as views
from razorctl.errors import NoFitError


@takes(*PLANNING, *RECIPE, *(name for name in JOB if name != "accumulate"))  # the plan chooses it
def plan(
    ctx: typer.Context,
    model: Annotated[str, MODEL] = "vit-b16",
    recipe: Preset = None,
    explain: Annotated[bool, option("--explain", help="Show what was tried, in order.")] = False,
    json: Json = False,
    **flags: Any,
) -> None:
    """Show the ways to train MODEL on DATASET on a card, what each needs, and which one to take.

    Training steps are traced without a device. Exact ways are listed beside
    approximate ones. With a method or any other setting of a recipe, only that
    recipe is planned.
    """
    from razorctl.cli import effects, planning  # imported here: --help needs neither
    from razorctl.cli.views import plan as view

    settings = read(ctx, flags | {"model": model}, recipe)
    if "dataset" not in settings.given:
        from razorctl import data, models

        known = models.named(settings.given["model"])
        task = settings.given.get("task", known.tasks[0])
        settings = settings.but(dataset=data.usual(task, known.modality))
    planning.say_data(settings.job_to_plan)
    try:
        planned = planning.plan(settings, quiet=json)
    except NoFitError as error:
        if json:
            views.print_json(error.document)
        else:
            view.show_ways(error.document)
        raise
    document = planned.document()
    effects.note_settings(ctx, planned.planned_recipe)
    effects.note_settings(ctx, planned.planned_job)
    if json:
        views.print_json(document)
    else:
        view.show(document, explain)
