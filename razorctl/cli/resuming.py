"""`finetune --resume`: the run that is in a directory, and what may be said about it again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from razorctl import data, models
from razorctl.cli.options import PLANNING
from razorctl.cli.planning import Settled
from razorctl.cli.settings import Settings
from razorctl.errors import UsageError
from razorctl.job import Job
from razorctl.training import checkpoints, run_files, rundir


def settle_by_run(out: Path | None, told: Settings, plan: Path | None) -> Settled | None:
    """The job, the recipe and the plan of the run in a directory; None if none is prepared there.

    told: the settings given now, which must be those of the run. plan: a file of `plan --json`,
    which must be the run's. Raises UsageError that names all others, and for an `out` of None.
    """
    if out is None:
        raise UsageError("there is nothing to resume; name the directory of the run with --out.")
    found = run_files.read_settings(out)
    if found is None:
        if not {"model", "dataset"} <= told.given.keys():
            raise UsageError(
                f"{out} holds no run to go on with; name MODEL and DATASET, to start one "
                "there: finetune vit-micro digits."
            )
        return None
    job, recipe = found
    from razorctl.planning.plan import Document  # imported here: few commands need it

    document = run_files.read_document(out / rundir.PLAN, Document)
    known = run_files.merged_settings(job, recipe)
    wanted = {name: value for name, value in told.given.items() if name in known}
    if "dataset" in wanted:
        wanted["dataset"] = data.place(wanted["dataset"])
    if document is not None:
        wanted.pop("accumulate", None)  # the plan has chosen it
    if "epochs" in wanted:
        steps = _steps(job, wanted.pop("epochs"))
        if steps is not None:  # only tokenizing tells how many they are
            wanted["steps"] = steps
    if wanted.get("precision") == "auto":
        del wanted["precision"]  # the run has the one that suited its device
    if wanted.get("learning_rate", job.learning_rate) != job.learning_rate and _diverged(out):
        job = replace(job, learning_rate=wanted.pop("learning_rate"))  # `Run` checks that it fits
    run_files.refuse_others(
        out, known | _planned(document), wanted | _planning(told, plan, document)
    )
    return job, recipe, document


def finished_result(out: Path) -> dict[str, Any] | None:
    """The result of the run in a directory, None if it is not finished."""
    from razorctl.training.schemas import RunResult  # imported here: few commands need it

    result = run_files.read_document(out / rundir.RESULT, RunResult)
    if result is not None and not result["job"].get("keep_checkpoints"):
        checkpoints.clear(out)  # of a process that was killed before it did so
    return result


def _steps(job: Job, epochs: float) -> int | None:
    """The steps that so many epochs of a resolved job are; None if that is not known yet."""
    examples = data.of(job).train_examples
    asked = replace(job, steps=None, epochs=epochs)
    return asked.resolved(models.find(job.model).defaults, examples).steps


def _diverged(out: Path) -> bool:
    marker = checkpoints.newest_marker(out)
    return marker is not None and bool(marker.get("diverged"))


def _planned(document: dict[str, Any] | None) -> dict[str, Any]:
    """What a run was planned for, by the names of settings, as far as its plan says."""
    if document is None:
        return dict.fromkeys(("vram", "gpu", "plan"))
    return {
        "vram": document["budget_bytes"],
        "gpu": document["gpu"]["name"],
        "prefer": document["prefer"],
        "plan": document["digest"],
    }


def _planning(told: Settings, plan: Path | None, document: dict[str, Any] | None) -> dict[str, Any]:
    """Settings of planning that are given now, as `_planned` has them; `document`: of the run."""
    from razorctl.planning import gpus
    from razorctl.planning import plan as planner

    wanted = {name: told.given[name] for name in PLANNING if name in told.given}
    if "vram" in wanted:
        asked = gpus.memory_size(wanted["vram"])
        memory = asked if document is None else document["gpu"]["memory_bytes"]
        wanted["vram"] = gpus.usable(asked, memory) or asked
    if "gpu" in wanted:
        wanted["gpu"] = gpus.load(wanted["gpu"]).name
    if plan is not None:
        wanted["plan"] = planner.read(plan)[2]["digest"]
    return wanted
