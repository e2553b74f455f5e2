"""A run of `finetune`: its settings are resolved, and it is prepared, trained or continued."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.cli.settings import Call
from razorctl.cli.views import common as views
from razorctl.errors import UsageError
from razorctl.system import processes

# Functions below import what a refused call does not need.
if TYPE_CHECKING:
    from razorctl.config.job import Job
    from razorctl.config.recipe import Recipe
    from razorctl.training.run import Run


def finetune(
    call: Call,
    plan: Path | None,
    out: Path | None,
    trackers: Sequence[str],
    device: str | None,
    resume: bool,
    dry_run: bool,
) -> dict[str, Any]:
    """The result of a run, or the document of a dry run; empty in all but the first process.

    The arguments are as in `api.finetune`. Raises RazorError.
    """
    from razorctl.system import c_compiler

    if dry_run and (resume or processes.count() > 1):
        other = "--resume" if resume else "torchrun"
        raise UsageError(f"a dry run prepares a new run, in one process; leave {other} out.")
    with processes.connected(device):
        c_compiler.start(device)
        resolved = processes.of_first(lambda: _resolve(call, plan, out, trackers, device, resume))
        if isinstance(resolved, dict):
            return resolved
        if dry_run:
            return _dry_run(resolved, device)
        return _run(call, resolved, device, resume)


@dataclass(frozen=True)
class _Resolved:
    """The settings of a run; `plan` is the document of its plan, if it has one."""

    job: "Job"
    recipe: "Recipe"
    plan: dict[str, Any] | None
    out: Path
    trackers: Sequence[str]


def _run(call: Call, resolved: _Resolved, device: str | None, resume: bool) -> dict[str, Any]:
    """Trains a run, and returns its result; empty in all but the first process."""
    from razorctl.cli import effects, pictures, progress

    def prepare(at: Callable[[str], None]) -> "Run":
        run = _begin(resolved, device=device, progress=at, resume=resume)
        effects.note_settings(call, run.job)  # its steps may come from the model
        return run

    run = progress.train(
        prepare, resolved.job, resolved.recipe, resolved.out, device, resolved.trackers
    )
    if not processes.first():
        return {}
    pictures.leave(run)
    return run.result()


def _begin(resolved: _Resolved, **options: Any) -> "Run":
    """The run of these settings; options: the other ones of `training.run.finetune`."""
    from razorctl.training import run as trainer

    out, plan = resolved.out, resolved.plan
    return trainer.finetune(resolved.job, resolved.recipe, out=out, plan=plan, **options)


def _dry_run(resolved: _Resolved, device: str | None) -> dict[str, Any]:
    """The document of a run that is prepared and not trained."""
    from razorctl.cli import progress

    begin = partial(_begin, resolved, device=device)
    run = progress.prepare_only(begin, resolved.job, resolved.recipe, device)
    return {
        "dry_run": True,
        "model": resolved.job.model,
        "dataset": resolved.job.dataset,
        "job": asdict(run.job),
        "recipe": asdict(run.recipe),
        "saved_bytes": run.saved_bytes,
        "full_saved_bytes": run.full_saved_bytes,
        "notes": [*run.notes],
        "sample": None if run.sample is None else asdict(run.sample),
        "rows": run.shown(),
    }


def _resolve(
    call: Call,
    plan: Path | None,
    out: Path | None,
    trackers: Sequence[str],
    device: str | None,
    resume: bool,
) -> _Resolved | dict[str, Any]:
    """The settings of a run; its result instead, if it is finished already."""
    from razorctl.cli import effects, planning, resuming
    from razorctl.training import rundir
    from razorctl.training import trackers as tracking

    earlier = None
    if resume:
        earlier = resuming.resolve_by_run(out, call.explicit, plan)
    if earlier is not None and out is not None:
        result = resuming.finished_result(out)
        if result is not None:
            views.say(f"{out} holds a finished run")
            return result
    trackers = tracking.check_trackers(trackers, out if resume else None)
    if plan is not None and call.preset is not None:
        raise UsageError(f"{plan} already sets the recipe; leave --recipe out, or plan again.")
    settings = call.settings
    if processes.count() > 1 and "processes" not in settings.given:
        settings = settings.but(processes=processes.count())
    if earlier is not None:
        job, chosen, document = earlier
    elif plan is not None:
        job, chosen, document = planning.resolve_by_file(plan, call.settings, device)
    else:
        rundir.choose(out, "", resume=resume)  # refuses a directory before data are read
        job, chosen, document = planning.resolve(settings, device, quiet=call.quiet)
    effects.note_settings(call, chosen)
    directory = rundir.choose(out, job.model, job.dataset, chosen.method, resume=resume)
    return _Resolved(job, chosen, document, directory, trackers)
