"""Shared by `plan` and `finetune`: planning for the given card, or for the card of this machine."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.cli.options import PLANNING
from razorctl.cli.settings import Settings
from razorctl.cli.views import common as views
from razorctl.cli.views import plan as view
from razorctl.errors import UsageError
from razorctl.job import Job, settle_precision
from razorctl.recipe import Recipe

if TYPE_CHECKING:
    import torch

    from razorctl.planning.plan import Plan

Settled = tuple[Job, Recipe, dict[str, Any] | None]  # the last is the plan's document, if planned


def plan(settings: Settings, place: "torch.device | None" = None, *, quiet: bool = False) -> "Plan":
    """The plan for the given card, memory and preference; `place` is the device it will run on.

    quiet: print no note when the card is assumed from the memory alone. Raises NoFitError if
    nothing fits, and UsageError for settings that cannot be used.
    """
    from razorctl.planning import detect
    from razorctl.planning import plan as planner
    from razorctl.planning.batch import largest_batch

    given = settings.given
    index = 0 if place is None else place.index or 0
    gpu, budget, source, assumed = detect.target(given.get("gpu"), given.get("vram"), index)
    if assumed and not quiet:
        views.note(f"{gpu.name} is assumed from --vram alone; name the card with --gpu.")
    job = settings.job_to_plan
    _check_place(settle_precision(job.precision, gpu.compute_capability), place, gpu.name)
    recipe = settings.recipe if settings.orders else None
    if recipe is not None:
        import torch

        from razorctl.training.compiled import refuse_uncompilable

        # `finetune` would refuse it when it is run.
        refuse_uncompilable(job, recipe, place or torch.device("cuda"))
    if job.activation_memory_budget is not None and not quiet:
        views.note("what the activation memory budget changes is not predicted.")
    prefer = given.get("prefer", "balanced")
    with view.planning(gpu.name, budget, source) as report:
        if settings.auto:
            tried = recipe or Recipe("full" if prefer == "exact" else "razor")
            size = largest_batch(job, gpu, tried, budget, report=report)
            job = replace(job, batch_size=size)
        return planner.plan(job, gpu, budget=budget, recipe=recipe, report=report, prefer=prefer)


def _check_place(precision: str, place: "torch.device | None", plan: str) -> None:
    """Raises UsageError if the device `place` cannot train in the precision of a plan."""
    if place is not None and place.type != "cuda" and precision == "fp16":
        raise UsageError(
            f"the plan for {plan} is in fp16, which cannot be trained on {place.type}; plan with "
            "--precision bf16 or fp32."
        )


def lookup_status(model: str) -> AbstractContextManager[object]:
    """Says inside it that a model is looked for, if its library must be loaded to know its name."""
    from razorctl import models

    registered = model in models.models()
    return nullcontext() if registered else views.status(f"looking for {model}")


def check_data(job: Job) -> None:
    """Checks a job and says on stderr what was detected in a data set of one's own.

    Raises what `data.check` raises.
    """
    from razorctl import data

    registered = job.dataset in data.DATASETS  # which is known without reading anything
    with lookup_status(job.model) if registered else views.status(f"reading {job.dataset}"):
        source = data.check(job)
    for line in source.told:
        views.say(line)


def settle(settings: Settings, device: str | None, *, quiet: bool = False) -> Settled:
    """The job, the recipe and, if they were planned, the document of the plan.

    A run is planned if --gpu or --vram is given. Without these it is planned if no setting of a
    recipe is given and the card it runs on has a preset. Raises UsageError for settings that
    cannot be used, and NoFitError if nothing fits.
    """
    given = settings.given
    if not {"model", "dataset"} <= given.keys():
        raise UsageError(
            "MODEL or DATASET is missing; name both: razorctl finetune vit-micro digits."
        )
    from razorctl.planning import detect

    check_data(settings.job_to_plan)  # before torch is loaded, which takes seconds
    if not {"gpu", "vram"} & given.keys():
        found = () if device == "cpu" else detect.cards()
        if settings.orders or not found:
            return _unplanned(settings)
    with views.status("looking for the device"):
        from razorctl import devices

        place = devices.find(device)
    if not {"gpu", "vram"} & given.keys():
        cards = found[place.index or 0 :] if place.type == "cuda" else ()
        if not cards or detect.preset_for(cards[0]) is None:
            views.note(f"the run is not planned: {devices.name(place)} has no preset.")
            return _unplanned(settings)
    planned = plan(settings, place, quiet=quiet)
    view.say_choice(planned)
    job = planned.planned_job
    if job.steps is None and "batch_size" not in given:  # of texts that may be fewer blocks than it
        job = replace(job, batch_size=None)
    return job, planned.planned_recipe, planned.document()


def _unplanned(settings: Settings) -> Settled:
    if settings.auto:
        raise UsageError("batch size auto needs a plan; name a card with --gpu, or --vram.")
    for name in (name for name in PLANNING if name in settings.given):
        views.note(f"{name.replace('_', ' ')} does nothing: the run is not planned.")
    return settings.job, settings.recipe, None


def settle_by_file(file: Path, flags: Mapping[str, Any], device: str | None) -> Settled:
    """The job, the recipe and the document in a file of `plan --json`.

    Raises UsageError for a file that cannot be used, and for a flag that the plan already sets,
    unless it is a field of the job with the plan's value.
    """
    from razorctl.planning.plan import read

    job, recipe, document = read(file)
    own = Settings({name: value for name, value in flags.items() if value is not None})
    settled = [*own.of(Job), *own.of(Recipe), *(n for n in PLANNING if n in own.given)]
    if other := [name for name in settled if getattr(job, name, None) != own.given[name]]:
        raise UsageError(
            f"{file} already sets {other[0].replace('_', ' ')}; leave it out, or plan again."
        )
    check_data(job)
    from razorctl import devices

    _check_place(job.precision, devices.find(device), str(file))
    return job, recipe, document
