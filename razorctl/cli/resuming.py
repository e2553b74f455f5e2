"""`finetune --resume`: the run in a directory, and the settings that may be given again."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from razorctl import data, models
from razorctl.cli.planning import Resolved
from razorctl.cli.settings import PLANNING, Settings
from razorctl.config.job import Job
from razorctl.errors import UsageError
from razorctl.training import checkpoints, run_files, rundir


def resolve_by_run(out: Path | None, settings: Settings, plan: Path | None) -> Resolved | None:
    """The job, the recipe and the plan of the run in a directory; None if there is no run yet.

    settings: given now; they must be those of the run. plan: a file of `plan --json`; it must be
    the run's. Raises UsageError that names all that differ, and for an `out` of None.
    """
    if out is None:
        raise UsageError("there is nothing to resume; name the directory of the run with --out.")
    rundir.choose(out, resume=True)  # refuses what holds something else
    earlier = run_files.read_settings(out)
    if earlier is None:
        if not {"model", "dataset"} <= settings.given.keys():
            raise UsageError(
                f"{out} holds no run to continue; name MODEL and DATASET to start one there, as "
                "in: finetune vit-micro digits."
            )
        return None
    job, recipe = earlier
    from razorctl.planning.plan import Document  # imported here: few commands need it

    document = run_files.read_document(out / rundir.PLAN, Document)
    of_run = run_files.merged_settings(job, recipe)
    wanted = {name: value for name, value in settings.given.items() if name in of_run}
    if "dataset" in wanted:
        place = data.place(wanted["dataset"])
        same = os.path.realpath(place) == os.path.realpath(job.dataset)
        wanted["dataset"] = job.dataset if same else place  # which may have followed links
    if document is not None:
        wanted.pop("accumulate", None)  # the plan has chosen it
    if "epochs" in wanted:
        steps = _steps(job, wanted.pop("epochs"))
        if steps is not None:  # else only tokenizing tells them
            wanted["steps"] = steps
    if wanted.get("precision") == "auto":
        del wanted["precision"]  # the run has settled it for its device
    if wanted.get("learning_rate", job.learning_rate) != job.learning_rate and _diverged(out):
        job = replace(job, learning_rate=wanted.pop("learning_rate"))  # checked by `Run`
    of_plan = _given_plan(settings, plan, document)
    run_files.refuse_others(out, of_run | _plan_of_run(document), wanted | of_plan)
    return job, recipe, document


def finished_result(out: Path) -> dict[str, Any] | None:
    """The result of the run in a directory, None if it is not finished."""
    from razorctl.training.schemas import RunResult  # imported here: few commands need it

    result = run_files.read_document(out / rundir.RESULT, RunResult)
    if result is not None and not result["job"].get("keep_checkpoints"):
        checkpoints.clear(out)  # if the process was killed before it did so
    return result


def _steps(job: Job, epochs: float) -> int | None:
    """The number of steps of a resolved job with so many epochs; None if it is not known yet."""
    examples = data.source_of(job).train_examples
    job = replace(job, steps=None, epochs=epochs)
    return job.resolved(models.find(job.model).defaults, examples).steps


def _diverged(out: Path) -> bool:
    marker = checkpoints.newest_marker(out)
    return marker is not None and bool(marker.get("diverged"))


def _plan_of_run(document: dict[str, Any] | None) -> dict[str, Any]:
    """The planning settings of a run, from the document of its plan."""
    if document is None:
        return dict.fromkeys(("vram", "gpu", "plan"))
    return {
        "vram": document["budget_bytes"],
        "gpu": document["gpu"]["name"],
        "prefer": document["prefer"],
        "plan": document["digest"],
    }


def _given_plan(
    settings: Settings, plan: Path | None, document: dict[str, Any] | None
) -> dict[str, Any]:
    """The planning settings that are given now, in the form of `_plan_of_run`."""
    from razorctl.planning import gpus
    from razorctl.planning import plan as planner

    wanted = {name: settings.given[name] for name in PLANNING if name in settings.given}
    if "vram" in wanted:
        size = gpus.memory_size(wanted["vram"])
        memory = size if document is None else document["gpu"]["memory_bytes"]
        wanted["vram"] = gpus.usable(size, memory) or size
    if "gpu" in wanted:
        wanted["gpu"] = gpus.load(wanted["gpu"]).name
    if plan is not None:
        wanted["plan"] = planner.read(plan)[2]["digest"]
    return wanted
