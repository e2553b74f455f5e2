"""`razorctl profile`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from razorctl.cli.options import (
    JOB,
    MODEL,
    RECIPE,
    Device,
    Json,
    Preset,
    argument,
    option,
    with_options,
)
from razorctl.cli.results import Result, print_result
from razorctl.config.keywords import ProfiledSettings

JOB_SETTINGS = [name for name in JOB if name in ProfiledSettings.__annotations__]
FIRST = (
    *("method", "ratio", "batch_size", "timed_steps", "precision", "device"),
    *("trace", "snapshot", "json"),
)


@with_options(*RECIPE, *JOB_SETTINGS, first=FIRST, planned=False)
def profile(
    ctx: typer.Context,
    model: Annotated[str, MODEL],
    dataset: Annotated[
        str | None,
        argument(
            "Data set, as for finetune; without it batches are random.",
            "DATASET",
            "data sets",
        ),
    ] = None,
    recipe: Preset = None,
    timed_steps: Annotated[
        int, option("Number of timed steps.", metavar="N", flag="--steps", envvar="RAZORCTL_STEPS")
    ] = 5,
    device: Device = None,
    trace: Annotated[
        Path | None, option("File for a Chrome trace of two steps.", "none", "FILE")
    ] = None,
    snapshot: Annotated[
        Path | None, option("File for a CUDA memory snapshot of two steps.", "none", "FILE")
    ] = None,
    json: Json = False,
    **flags: Any,
) -> None:
    """Show the memory and time of a training step of MODEL, by layer and by phase.

        razorctl profile vit-b16 --method razor --ratio 0.9

    The bytes stored for backward are traced, with this recipe and with full
    fine-tuning. The times are measured on real steps with random weights. Without
    DATASET batches are random, and nothing is downloaded.

    For a model of your own, call `razorctl.profile(model, inputs)` in Python.
    """
    from razorctl import api
    from razorctl.cli import calls

    result = calls.run(ctx, api.profile, model=model, dataset=dataset, steps=timed_steps)
    print_result(ctx, result, Result.show)
