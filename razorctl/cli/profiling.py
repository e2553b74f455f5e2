"""A profile of `profile`: of a model by name, or of the bytes that any nn.Module stores."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from razorctl.cli.settings import DATA_SETTINGS, Call
from razorctl.cli.views import common as views
from razorctl.config.keywords import ProfiledSettings, RecipeSettings
from razorctl.errors import UsageError
from razorctl.registry import find

# Settings that apply to any nn.Module.
OF_MODULE = {*RecipeSettings.__annotations__, "precision"}
# Options of a model by name with their defaults; they do not apply to an nn.Module.
OPTIONS = {"steps": 5, **dict.fromkeys(("dataset", "device", "trace", "snapshot"))}


def profile(call: Call, model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a model by name.

    options: as of `api.profile` in OPTIONS. Raises UsageError for settings that cannot be used.
    """
    from razorctl import models
    from razorctl.cli import effects, planning
    from razorctl.config.job import Job
    from razorctl.system import c_compiler, folders

    named = model.startswith(models.prefixes()) or folders.exists(Path(model).expanduser())
    if ":" in model and not named:
        raise UsageError(
            f"{model} is not the name of a model, such as vit-b16 or timm:NAME; trace a model of "
            "your own in Python, by razorctl.profile(model, inputs)."
        )
    dataset, settings = options["dataset"], call.settings
    chosen = settings.recipe
    effects.note_settings(call, chosen)
    names = ProfiledSettings.__annotations__.keys() - RecipeSettings.__annotations__.keys()
    of_job = {name: value for name, value in settings.given.items() if name in names}
    # The settings are checked before torch is loaded, which takes seconds.
    with planning.lookup_status(model):
        name = models.find(model, of_job.get("task")).name
    job = Job(name, dataset or "random", steps=options["steps"], **of_job)
    if dataset is not None:
        planning.check_data(job)
    elif of_data := [name for name in DATA_SETTINGS if name in call.given]:
        flag = of_data[0].replace("_", "-")
        raise UsageError(f"--{flag} is for reading a data set; name one, or leave it out.")
    c_compiler.start(options["device"])
    with views.status(f"profiling {model}") as at:
        from razorctl.training.profiler import profile as measure

        if dataset is None:
            of_job = {n: value for n, value in of_job.items() if n not in DATA_SETTINGS}
        document = measure(model, chosen, progress=at, **options, **of_job).result()
    for sentence in document["notes"]:
        views.note(sentence)
    return document


def profile_module(
    call: Call, net: Any, options: Mapping[str, Any], inputs: Any, forward: Any = None
) -> dict[str, Any]:
    """The document of any nn.Module, which has the bytes that it stores for backward.

    Raises UsageError for settings that do not apply to an nn.Module.
    """
    from razorctl.cli import effects

    given = [name for name, value in options.items() if value != OPTIONS[name]]
    for name in (*given, *call.given):
        if name not in OF_MODULE:
            raise UsageError(
                f"{name.replace('_', ' ')} does not apply to a model of your own, which is only "
                "traced; leave it out."
            )
    settings = call.settings
    effects.note_settings(call, settings.recipe)
    with views.status(f"tracing {type(net).__name__}"):
        from razorctl.step import DTYPES
        from razorctl.training.kept_bytes import trace_kept_bytes

        precision = settings.given.get("precision", "auto")
        precision = "fp32" if precision == "auto" else precision
        autocast = find("precision", precision, DTYPES)
        recipe = settings.recipe if settings.orders else None
        traced = trace_kept_bytes(net, inputs, recipe, autocast=autocast, forward=forward)
        return {**traced.result(), "precision": precision}
