"""`razorctl list`."""

from typing import Annotated

import typer

from razorctl.cli.options import Json, argument
from razorctl.cli.results import Result, print_result


def list_names(
    ctx: typer.Context,
    kind: Annotated[
        str | None,
        argument(
            "models, datasets, methods, gpus or recipes; or defaults, for a model and a data set.",
            "KIND",
        ),
    ] = None,
    model: Annotated[str | None, argument("Model, for defaults.", "MODEL", "models")] = None,
    dataset: Annotated[
        str | None,
        argument(
            "Data set, for defaults; without it, a usual one for the model.", "DATASET", "data sets"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List models, data sets, methods, GPUs and recipes, or describe one KIND.

        razorctl list models

    defaults MODEL DATASET shows the default training settings of the model on the
    data set, and the source of each.
    """
    from razorctl import api
    from razorctl.cli import calls

    result = calls.run(ctx, api.list)
    print_result(ctx, result, Result.show)
