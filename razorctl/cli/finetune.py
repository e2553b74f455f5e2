"""`razorctl finetune`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from razorctl.cli import effects, planning, resuming
from razorctl.cli.options import (
    JOB,
    PLANNING,
    RECIPE,
    Device,
    Json,
    Preset,
    of_plan,
    option,
    takes,
)
from razorctl.cli.settings import read, told
from razorctl.cli.views import common as views
from razorctl.cli.views import finetune as view
from razorctl.errors import UsageError
from razorctl.ops.cpu import build
from razorctl.training import rundir
from razorctl.training import trackers as tracking

if TYPE_CHECKING:
    from razorctl.training.run import Run


@takes(*PLANNING, *RECIPE, *JOB)
def finetune(
    ctx: typer.Context,
    plan: Annotated[Path | None, of_plan(help="File of `plan --json`, run as planned.")] = None,
    recipe: Preset = None,
    device: Device = None,
    out: Annotated[Path | None, option(help="New run directory. [default: under runs/]")] = None,
    resume: Annotated[
        bool, option("--resume", help="Go on in --out, or start there if nothing is saved yet.")
    ] = False,
    tracker: Annotated[
        list[str] | None,
        option(help="tensorboard, trackio or wandb; may be repeated. [default: none]"),
    ] = None,
    json: Json = False,
    **flags: Any,
) -> None:
    """Fine-tune MODEL on DATASET and write the run to a directory.

    The directory gets config.toml, metrics.jsonl and, at the end, the model, as
    timm or transformers load it, and result.json. Settings that are not given
    take the measured defaults of the model and the method. With --vram or --gpu,
    the run is planned first, and on CUDA its memory is limited to the plan's.
    --plan runs the plan in a file.
    Without these options and without a recipe, the run is planned for the CUDA
    card it runs on, if there is one. The precision on CUDA is bf16, or fp16 on
    older cards.

    A run that was stopped, by Ctrl-C or in any other way, goes on with --resume
    --out DIR from its newest checkpoint, and ends with the same weights. MODEL,
    DATASET and settings may then be left out.

    Trackers get losses, rates and evaluations. TensorBoard and wandb write into
    the run directory; WANDB_MODE=offline keeps all there.
    """
    from razorctl.cli import progress  # imported here: it loads rich's bars, which slow --help

    begun = resuming.begun(out, told(ctx, flags, recipe), plan) if resume else None
    if begun is not None and out is not None and (result := resuming.finished(out)) is not None:
        views.say(f"{out} holds a finished run")
        return _show(result, json)
    trackers = tracking.check(tracker or (), out if resume else None)
    settings = read(ctx, flags, recipe)
    if plan is not None and recipe is not None:
        raise UsageError(f"{plan} already sets the recipe; leave --recipe out, or plan again.")
    build.start(device)
    if begun is not None:
        job, chosen, document = begun
    elif plan is not None:
        job, chosen, document = planning.settle_by_file(plan, flags, device)
    else:
        job, chosen, document = planning.settle(settings, device, quiet=json)
    effects.note_settings(ctx, chosen)
    directory = rundir.choose(out, job.model, job.dataset, chosen.method, resume=resume)

    def prepare(at: Callable[[str], None]) -> "Run":
        from razorctl.training import run as trainer

        run = trainer.finetune(
            job,
            chosen,
            out=directory,
            device=device,
            plan=document,
            progress=at,
            resume=resume,
        )
        effects.note_settings(ctx, run.job)  # resolved: its steps may come from the model
        return run

    _show(progress.train(prepare, job, chosen, directory, device, trackers).result(), json)


def _show(result: dict[str, Any], json: bool) -> None:
    if json:
        views.print_json(result)
    else:
        view.show(result)
