"""`finetune --resume`: the run in a directory, and the check of the settings that are given."""

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

    Raises UsageError that names the settings that differ from the run's, and for an `out` of None.

    settings: of this call; they must be the run's. plan: file of `plan --json`; likewise.
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
    from razorctl.planning.plan import Document

    document = run_files.read_document(out / rundir.PLAN, Document)
    of_run = run_files.merged_settings(job, recipe)
    wanted = {name: value for name, value in settings.given.items() if name in of_run}
    if "dataset" in wanted:
        place = data.place(wanted["dataset"])
        same = os.path.realpath(place) == os.path.realpath(job.dataset)
        wanted["dataset"] = job.dataset if same else place  # the run's may be behind a link
    if document is not None:
        wanted.pop("accumulate", None)  # the plan chose it
    if "epochs" in wanted:
        steps = _steps(job, wanted.pop("epochs"))
        if steps is not None:
            wanted["steps"] = steps
    if wanted.get("precision") == "auto":
        del wanted["precision"]  # resolved for the run's device
    marker = checkpoints.newest_marker(out) if "learning_rate" in wanted else None
    if marker is not None and marker["diverged"]:
        job = replace(job, learning_rate=wanted.pop("learning_rate"))  # `Run` checks it
    of_plan = _given_plan(settings, plan, document)
    run_files.refuse_others(out, of_run | _plan_of_run(document), wanted | of_plan)
    return job, recipe, document


def finished_result(out: Path) -> dict[str, Any] | None:
    """The result of the run in a directory, None if it is not finished."""
    from razorctl.training.schemas import RunResult

    result = run_files.read_document(out / rundir.RESULT, RunResult)
    if result is not None and not result["job"].get("keep_checkpoints"):
        checkpoints.clear(out)  # the process may have been killed before this
    return result


def _steps(job: Job, epochs: float) -> int | None:
    """The steps of a resolved job with so many epochs; None for texts, which are not tokenized."""
    examples = data.source_of(job).train_examples
    job = replace(job, steps=None, epochs=epochs)
    return job.resolved(models.find(job.model).defaults, examples).steps


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
    """The planning settings of this call, under the names of `_plan_of_run`."""
    from razorctl.planning import gpus
    from razorctl.planning import plan as planner

    wanted = {name: settings.given[name] for name in PLANNING if name in settings.given}
    wanted.pop("host_memory", None)  # of the machine that planned it
    if "vram" in wanted:
        size = gpus.memory_size(wanted["vram"])
        memory = size if document is None else document["gpu"]["memory_bytes"]
        wanted["vram"] = gpus.usable(size, memory) or size
    if "gpu" in wanted:
        wanted["gpu"] = gpus.load(wanted["gpu"]).name
    if plan is not None:
        wanted["plan"] = planner.read(plan)[2]["digest"]
    return wanted
