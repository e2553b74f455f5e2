"""`razorctl evaluate`."""

from typing import Annotated, Any

import typer

from razorctl.cli.options import (
    DATASET,
    Batch,
    Device,
    Json,
    RunArgument,
    Weights,
    option,
    with_options,
)
from razorctl.cli.results import Result, print_result
from razorctl.cli.settings import OF_DATA


@with_options(*OF_DATA, first=("split", "weights", "batch_size", "device", "json"))
def evaluate(
    ctx: typer.Context,
    run: RunArgument,
    dataset: Annotated[str | None, DATASET] = None,
    split: Annotated[
        str | None, option("Split to evaluate.", "the split of the run's own evaluation", "NAME")
    ] = None,
    weights: Weights = None,
    batch_size: Batch = None,
    device: Device = None,
    json: Json = False,
    **flags: Any,
) -> None:
    """Evaluate a finished RUN on DATASET, or on the held-out rows of its own data.

        razorctl evaluate runs/photos

    Without DATASET, the run is evaluated on the same rows as in training: its test
    or validation split, or the held-out rows. With DATASET, it is evaluated on the
    test split, else the validation split, else all rows. Labels are matched to
    the classes of the run by name.

    The weights are the best ones, by the evaluations during training.
    --weights last gives the metrics of the run's result.json.
    """
    from razorctl import finished
    from razorctl.cli import calls

    result = calls.run(ctx, finished.evaluate, data=dataset)
    print_result(ctx, result, Result.show)
