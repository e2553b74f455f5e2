"""`razorctl plan`."""

from functools import partial
from typing import Annotated, Any

import typer

from razorctl.cli.options import (
    JOB,
    MODEL,
    PLANS,
    RECIPE,
    Json,
    Preset,
    switch,
    with_options,
)
from razorctl.cli.results import print_result
from razorctl.errors import NoFitError

JOB_SETTINGS = [name for name in JOB if name != "accumulate"]  # which the plan chooses
FIRST = (
    *("gpu", "vram", "prefer", "batch_size", "precision", "optimizer", "method", "ratio"),
    *("max_ratio", "explain", "json"),
)


@with_options(*PLANS, *RECIPE, *JOB_SETTINGS, first=FIRST)
def plan(
    ctx: typer.Context,
    model: Annotated[str, MODEL] = "vit-b16",
    recipe: Preset = None,
    explain: Annotated[bool, switch("--explain", "Explain the choice step by step.")] = False,
    json: Json = False,
    **flags: Any,
) -> None:
    """Predict the memory and time of each way to train MODEL on DATASET, and choose one.

        razorctl plan vit-b16 cifar100 --gpu rtx-4090

    Training steps are traced without a GPU. With a method or any other setting of
    a recipe, only that recipe is planned.

    Ways marked ≈ have an approximate gradient. Its cosine to the exact gradient
    says how close it is: 1 is exact; at 0.998 the gradient points the same way,
    with an orthogonal error of 6 % of its length.

    checkpoint is the better choice where weights and optimizer state take most of
    the memory, as in decoders with AdamW: razor then saves little of the peak, and
    the exact gradient costs little time.
    """
    from razorctl import api
    from razorctl.cli import calls
    from razorctl.cli.views import plan as view

    try:
        result = calls.run(ctx, api.plan, model=model)
    except NoFitError as error:
        print_result(ctx, error.document, view.show_ways)
        raise
    print_result(ctx, result, partial(view.show, explain=explain))
