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
            "models, datasets, methods, gpus or recipes, to show in full; or defaults, with a "
            "model and a data set.",
            "KIND",
        ),
    ] = None,
    model: Annotated[
        str | None, argument("Model whose defaults are shown.", "MODEL", "models")
    ] = None,
    dataset: Annotated[
        str | None,
        argument(
            "Data set of the defaults; without it, the model's usual one.", "DATASET", "data sets"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show the names of all models, data sets, methods, GPUs and recipes, or one KIND in full.

        razorctl list models

    defaults MODEL DATASET shows the default training settings of the model on the
    data set, and where each comes from.
    """
    from razorctl import api
    from razorctl.cli import calls

    result = calls.run(ctx, api.list)
    print_result(ctx, result, Result.show)
