"""`razorctl finetune`."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from razorctl.cli.options import (
    JOB,
    PLANNING,
    RECIPE,
    Device,
    Json,
    Preset,
    evaluation_option,
    machine_option,
    option,
    plan_option,
    with_options,
)
from razorctl.cli.settings import Call, call_settings, given_settings, print_result
from razorctl.cli.views import common as views
from razorctl.errors import UsageError
from razorctl.system import processes

# What --help does not need is imported in the functions below.
if TYPE_CHECKING:
    from razorctl.config.job import Job
    from razorctl.config.recipe import Recipe
    from razorctl.training.run import Run


FIRST = (
    *("out", "resume", "epochs", "steps", "batch_size", "learning_rate"),
    *("method", "ratio", "vram", "gpu", "json"),
)


@with_options(*PLANNING, *RECIPE, *JOB, first=FIRST)
def finetune(
    ctx: typer.Context,
    plan: Annotated[
        Path | None,
        plan_option(help="File of `plan --json`, run as planned.", default="none", metavar="FILE"),
    ] = None,
    recipe: Preset = None,
    device: Device = None,
    out: Annotated[
        Path | None, option(help="New run directory.", default="under runs/", metavar="DIR")
    ] = None,
    resume: Annotated[
        bool,
        option(
            "--resume", help="Continue the run in --out, or start there if it is new.", metavar=""
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        machine_option(
            "--dry-run",
            help="Prepare the run, show its settings and a sample of its rows, and stop.",
            metavar="",
        ),
    ] = False,
    tracker: Annotated[
        list[str] | None,
        evaluation_option(
            help="Tracker of losses and metrics; may be repeated.",
            default="none",
            metavar="[tensorboard|trackio|wandb]",
        ),
    ] = None,
    json: Json = False,
    **flags: Any,
) -> dict[str, Any]:
    """Fine-tune MODEL on DATASET and write the run to a directory.

        razorctl finetune vit-b16 ./photos --out runs/photos

    The run directory gets config.toml, metrics.jsonl and, at the end, result.json
    and the model in the format of timm or transformers. Settings that are not
    given have the measured defaults of the model and the method.

    With --vram or --gpu, the run is planned first, and on CUDA its memory is
    limited to the plan's. --plan runs the plan in a file. Without these options
    and without a recipe, the run is planned for the CUDA card it runs on, if
    there is one. The precision on CUDA is bf16, or fp16 on older cards.

    After Ctrl-C or any other end, --resume --out DIR continues a run from its
    newest checkpoint, to the same weights. MODEL, DATASET and settings may then
    be left out.

    Under torchrun, the processes share each batch; README.md shows the command.

    Trackers get losses, learning rates and evaluations. TensorBoard and wandb
    write into the run directory; with WANDB_MODE=offline nothing leaves it.
    """
    from razorctl.cli.views import finetune as view
    from razorctl.system import c_compiler

    if dry_run and (resume or processes.count() > 1):
        other = "--resume" if resume else "torchrun"
        raise UsageError(f"a dry run prepares a new run, in one process; leave {other} out.")
    with processes.connected(device):
        c_compiler.start(device)
        settled = processes.of_first(
            lambda: _settle(
                ctx,
                flags,
                plan=plan,
                recipe=recipe,
                device=device,
                out=out,
                resume=resume,
                tracker=tracker or (),
                quiet=json,
            )
        )
        if isinstance(settled, dict):
            result = settled
        elif dry_run:
            result = _prepare(settled, device)
        else:
            result = _run(ctx, settled, device, resume)
    if processes.first():
        print_result(ctx, result, view.show_dry_run if dry_run else view.show)
    return result


@dataclass(frozen=True)
class _Settled:
    """All that a run is made of; `plan` is the document of its plan, if it is planned."""

    job: "Job"
    recipe: "Recipe"
    plan: dict[str, Any] | None
    out: Path
    trackers: Sequence[str]


def _run(ctx: Call, settled: _Settled, device: str | None, resume: bool) -> dict[str, Any]:
    """Trains, and returns the result, which is empty in all but the first process."""
    from razorctl.cli import effects, progress
    from razorctl.training.threads import Threads

    def prepare(at: Callable[[str], None]) -> "Run":
        run = _begun(settled, device, at, threads.settle, resume)
        effects.note_settings(ctx, run.job)  # resolved: its steps may come from the model
        return run

    with Threads() as threads:
        run = progress.train(
            prepare, settled.job, settled.recipe, settled.out, device, settled.trackers
        )
    return run.result() if processes.first() else {}


def _begun(
    settled: _Settled,
    device: str | None,
    at: Callable[[str], None],
    settle: Callable[..., None],
    resume: bool = False,
) -> "Run":
    """The run that `training.run.finetune` returns for settings."""
    from razorctl.training import run as trainer

    return trainer.finetune(
        settled.job,
        settled.recipe,
        out=settled.out,
        device=device,
        plan=settled.plan,
        progress=at,
        resume=resume,
        settle=settle,
    )


def _prepare(settled: _Settled, device: str | None) -> dict[str, Any]:
    """Prepares a run without training it, and returns what is known of it then."""
    from razorctl.cli import progress

    runs: list[Run] = []

    def settle(run: "Run", _: object) -> None:
        runs.append(run)
        raise progress.DryRunError

    def prepare(at: Callable[[str], None]) -> object:
        return _begun(settled, device, at, settle)

    run = progress.prepare_only(prepare, runs.pop, settled.job, settled.recipe, device)
    return {
        "dry_run": True,
        "model": settled.job.model,
        "dataset": settled.job.dataset,
        "job": asdict(run.job),
        "recipe": asdict(run.recipe),
        "saved_bytes": run.saved_bytes,
        "full_saved_bytes": run.full_saved_bytes,
        "notes": [*run.notes],
        "sample": None if run.sample is None else asdict(run.sample),
        "rows": run.shown(),
    }


def _settle(
    ctx: Call,
    flags: dict[str, Any],
    *,
    plan: Path | None,
    recipe: str | None,
    device: str | None,
    out: Path | None,
    resume: bool,
    tracker: Sequence[str],
    quiet: bool,
) -> _Settled | dict[str, Any]:
    """Settles what is run; returns the result instead if that run is finished."""
    from razorctl.cli import effects, planning, resuming
    from razorctl.training import rundir
    from razorctl.training import trackers as tracking

    earlier = None
    if resume:
        earlier = resuming.settle_by_run(out, call_settings(ctx, flags, recipe), plan)
    if earlier is not None and out is not None:
        result = resuming.finished_result(out)
        if result is not None:
            views.say(f"{out} holds a finished run")
            return result
    trackers = tracking.check_trackers(tracker, out if resume else None)
    if plan is not None and recipe is not None:
        raise UsageError(f"{plan} already sets the recipe; leave --recipe out, or plan again.")
    settings = given_settings(ctx, flags, recipe)
    if processes.count() > 1 and "processes" not in settings.given:
        settings = settings.but(processes=processes.count())
    if earlier is not None:
        job, chosen, document = earlier
    elif plan is not None:
        job, chosen, document = planning.settle_by_file(plan, flags, device)
    else:
        rundir.choose(out, "", resume=resume)  # before data are read
        job, chosen, document = planning.settle(settings, device, quiet=quiet)
    effects.note_settings(ctx, chosen)
    directory = rundir.choose(out, job.model, job.dataset, chosen.method, resume=resume)
    return _Settled(job, chosen, document, directory, trackers)
