"""Planning for `plan` and `finetune`, for a given card or for this machine's."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.cli.settings import PLANNING, Call, Settings
from razorctl.cli.views import common as views
from razorctl.cli.views import plan as view
from razorctl.config.job import Job, resolve_precision
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.system import host_memory

if TYPE_CHECKING:
    import torch

    from razorctl.planning.plan import Plan

Resolved = tuple[Job, Recipe, dict[str, Any] | None]  # the last is the document of a plan


def document(call: Call) -> dict[str, Any]:
    """The document of `api.plan`; raises NoFitError if nothing fits."""
    from razorctl.cli import effects

    settings = call.settings
    if "dataset" not in settings.given:
        from razorctl import data, models

        with lookup_status(settings.given["model"]):
            entry = models.named(settings.given["model"])
        task = settings.given.get("task", entry.tasks[0])
        settings = settings.but(dataset=data.usual(task, entry.modality))
    check_data(check_names(settings))
    result = plan(settings, quiet=call.quiet)
    effects.note_settings(call, result.planned_recipe)
    effects.note_settings(call, result.planned_job)
    return result.document()


def plan(settings: Settings, place: "torch.device | None" = None, *, quiet: bool = False) -> "Plan":
    """The plan of settings for their card, memory and preference.

    place: the device of a run by this plan. quiet: print no notes.
    Raises NoFitError if nothing fits, and UsageError for settings that cannot be used.
    """
    from razorctl.planning import detect, gpus
    from razorctl.planning import plan as planner
    from razorctl.planning.batch import largest_batch
    from razorctl.planning.candidates import label

    given = settings.given
    index = 0 if place is None else place.index or 0
    gpu, budget, source, assumed = detect.target(given.get("gpu"), given.get("vram"), index)
    if assumed and not quiet:
        views.note(f"{gpu.name} is assumed from --vram alone; name the card with --gpu.")
    job = settings.job_to_plan
    _check_place(resolve_precision(job.precision, gpu.compute_capability), place, gpu.name)
    recipe = settings.recipe if settings.orders else None
    if recipe is not None:
        from razorctl.training.compiled import refuse_uncompilable

        refuse_uncompilable(job, recipe)  # `finetune` would refuse it later
    if job.activation_memory_budget is not None and not quiet:
        views.note("the effect of the activation memory budget is not predicted.")
    prefer = given.get("prefer", "balanced")
    host = host_memory.available() if "gpu" not in given else None  # else of another machine
    if "host_memory" in given:
        host = gpus.memory_size(given["host_memory"])
    with view.planning(gpu.name, budget, source) as report:
        if settings.auto:
            tried = recipe or Recipe("full" if prefer == "exact" else "razor")
            size = largest_batch(job, gpu, tried, budget, report=report)
            job = replace(job, batch_size=size)
            if not quiet:
                views.note(f"{size:,} is the largest batch of {label(tried, 1)} in one pass.")
        return planner.plan(
            *(job, gpu, recipe), budget=budget, prefer=prefer, host_memory=host, report=report
        )


def _check_place(precision: str, place: "torch.device | None", plan: str) -> None:
    """Raises UsageError if the device of a run cannot train in the precision of its plan.

    plan: its card or its file, for the error.
    """
    if place is not None and place.type != "cuda" and precision == "fp16":
        raise UsageError(
            f"the plan for {plan} is in fp16, which cannot be trained on {place.type}; plan with "
            "--precision bf16 or fp32."
        )


def lookup_status(model: str) -> AbstractContextManager[object]:
    """Shows a text while a model is looked up, if its library must be loaded."""
    from razorctl import models

    registered = model in models.models()
    return nullcontext() if registered else views.status(f"looking for {model}")


def check_names(settings: Settings) -> Job:
    """The job of settings; raises UsageError for a wrong recipe, card or memory."""
    from razorctl.planning import gpus

    _ = settings.recipe
    if "gpu" in settings.given:
        gpus.load(settings.given["gpu"])
    for name in ("vram", "host_memory"):
        if name in settings.given:
            gpus.memory_size(settings.given[name])
    return settings.job_to_plan


def check_data(job: Job) -> None:
    """Checks a job, and prints on stderr what was detected in a user's data set.

    Raises what `data.check` raises.
    """
    from razorctl import data

    registered = job.dataset in data.DATASETS
    with lookup_status(job.model) if registered else views.status(f"reading {job.dataset}"):
        source = data.check(job)
    for line in source.details:
        views.say(line)


def resolve(settings: Settings, device: str | None, *, quiet: bool = False) -> Resolved:
    """The job, the recipe and, for a planned run, the document of the plan.

    A run is planned with --gpu or --vram. Without a setting of a recipe it is also planned if its
    card has a preset. Raises UsageError for settings that cannot be used, and NoFitError if nothing
    fits.
    """
    given = settings.given
    if not {"model", "dataset"} <= given.keys():
        raise UsageError(
            "MODEL or DATASET is missing; name both, as in: razorctl finetune vit-micro digits."
        )
    from razorctl.planning import detect

    check_data(check_names(settings))  # before torch is loaded, which takes seconds
    if not {"gpu", "vram"} & given.keys():
        cards = () if device == "cpu" else detect.cards()
        if settings.orders or not cards:
            return _unplanned(settings)
    with views.status("looking for the device"):
        from razorctl.system import devices

        place = devices.find(device)
    if not {"gpu", "vram"} & given.keys():
        index = place.index or 0
        detected = place.type == "cuda" and index < len(cards)
        if not detected or detect.preset_for(cards[index]) is None:
            views.note(f"the run is not planned: {devices.name(place)} has no preset.")
            return _unplanned(settings)
    planned = plan(settings, place, quiet=quiet)
    view.say_choice(planned)
    job = planned.planned_job
    if job.steps is None and "batch_size" not in given:  # texts may be fewer blocks than the batch
        job = replace(job, batch_size=None)
    return job, planned.planned_recipe, planned.document()


def _unplanned(settings: Settings) -> Resolved:
    if settings.auto:
        raise UsageError("batch size auto needs a plan; name a card with --gpu, or --vram.")
    for name in PLANNING:
        if name in settings.given:
            views.note(f"{name} does nothing: the run is not planned.")
    return settings.job, settings.recipe, None


def resolve_by_file(file: Path, settings: Settings, device: str | None) -> Resolved:
    """The job, the recipe and the document in a file of `plan --json`.

    Raises UsageError for a file that cannot be used, and for a setting that differs from the
    plan's.
    """
    from razorctl.planning.plan import read

    job, recipe, document = read(file)
    for name in [*settings.of(Job), *settings.of(Recipe), *PLANNING]:
        if name in settings.given and settings.given[name] != getattr(job, name, None):
            raise UsageError(
                f"{file} already sets {name.replace('_', ' ')}; leave it out, or plan again."
            )
    check_data(job)
    from razorctl.system import devices

    _check_place(job.precision, devices.find(device), str(file))
    return job, recipe, document
