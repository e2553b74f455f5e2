"""`razorctl profile`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from razorctl.cli.options import MODEL, RECIPE, Device, Json, option, takes
from razorctl.cli.settings import Call, read
from razorctl.cli.views import common as views

OF_JOB = (
    "task",
    "input_size",
    "batch_size",
    "precision",
    "optimizer",
    "compile",
    "cuda_graphs",
)  # what changes a step's cost


@takes(*RECIPE, *OF_JOB)
def profile(
    ctx: typer.Context,
    model: Annotated[str, MODEL],
    timed_steps: Annotated[int, option("--steps", help="Number of timed steps.")] = 5,
    device: Device = None,
    trace: Annotated[Path | None, option(help="File for a Chrome trace of two steps.")] = None,
    snapshot: Annotated[
        Path | None, option(help="File for a CUDA memory snapshot of two steps.")
    ] = None,
    json: Json = False,
    **flags: Any,
) -> None:
    """Show where the bytes and the time of a training step of MODEL go.

    The saved bytes, of this recipe and of full fine-tuning, are traced. The times
    are measured on real steps with fresh weights and random batches; nothing is
    downloaded.
    """
    from razorctl.cli.views import profile as view  # imported here: --help does not need it

    result = profiled(ctx, model, timed_steps, device, trace, snapshot, **flags)
    if json:
        views.print_json(result)
    else:
        view.show(result)


def profiled(
    ctx: Call,
    model: str,
    timed_steps: int = 5,
    device: str | None = None,
    trace: Path | None = None,
    snapshot: Path | None = None,
    **flags: Any,
) -> dict[str, Any]:
    """The profile that `profile` prints."""
    from razorctl import models
    from razorctl.cli import effects
    from razorctl.job import Job
    from razorctl.ops.cpu import build

    settings = read(ctx, flags)
    recipe = settings.recipe
    effects.note_settings(ctx, recipe)
    of_job = {name: settings.given[name] for name in OF_JOB if name in settings.given}
    # Checks the settings before torch is loaded, which takes seconds.
    Job(models.find(model, of_job.get("task")).name, "random", steps=timed_steps, **of_job)
    build.start(device)
    with views.waiting(f"profiling {model}"):
        from razorctl.training.profiler import profile as measure

        return measure(
            model,
            recipe,
            steps=timed_steps,
            device=device,
            trace=trace,
            snapshot=snapshot,
            **of_job,
        ).result()
