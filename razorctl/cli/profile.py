"""`razorctl profile`."""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from razorctl.cli.names import completion
from razorctl.cli.options import DATA_SETTINGS, RECIPE, Device, Json, Preset, option, with_options
from razorctl.cli.settings import Call, Settings, given_settings, is_given, print_result
from razorctl.cli.views import common as views
from razorctl.errors import UsageError

# Settings of a job that change the cost of a step.
JOB_SETTINGS = (
    *("task", "input_size", "batch_size", "precision", "optimizer", "compile", "cuda_graphs"),
    *DATA_SETTINGS,
)
FUNCTION = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")  # module:function
# Parameters that apply to any nn.Module, and to one that module:function returns.
OF_MODULE = {*RECIPE, "recipe", "precision"}
OF_FUNCTION = {*OF_MODULE, "model", "input_size", "batch_size", "json"}
FIRST = (
    *("method", "ratio", "batch_size", "timed_steps", "precision", "device"),
    *("trace", "snapshot", "json"),
)


@with_options(*RECIPE, *JOB_SETTINGS, first=FIRST, planned=False)
def profile(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="Name of a model, or module:function of your own.",
            autocompletion=completion("models"),
            metavar="MODEL",
        ),
    ],
    dataset: Annotated[
        str | None,
        typer.Argument(
            help="Data set of the batches, as for finetune; without it they are random.",
            autocompletion=completion("data sets"),
            metavar="DATASET",
            show_default=False,
        ),
    ] = None,
    recipe: Preset = None,
    timed_steps: Annotated[
        int, option("--steps", envvar="RAZORCTL_STEPS", help="Number of timed steps.", metavar="N")
    ] = 5,
    device: Device = None,
    trace: Annotated[
        Path | None,
        option(help="File for a Chrome trace of two steps.", default="none", metavar="FILE"),
    ] = None,
    snapshot: Annotated[
        Path | None,
        option(
            help="File for a CUDA memory snapshot of two steps.", default="none", metavar="FILE"
        ),
    ] = None,
    json: Json = False,
    **flags: Any,
) -> dict[str, Any]:
    """Show where the bytes and the time of a training step of MODEL go.

        razorctl profile vit-b16 --method razor --ratio 0.9

    The bytes kept for backward are traced, with this recipe and in full
    fine-tuning. The times are measured on real steps with random weights. Batches
    are random, so nothing is downloaded, or those of DATASET.

    module:function is imported, from the current directory first, and called
    without arguments. It returns a model and its inputs, or just a model of timm
    or transformers. The bytes of such a model are traced; no step is run.
    """
    from razorctl import models
    from razorctl.cli import effects, planning
    from razorctl.cli.views import profile as view
    from razorctl.config.job import Job
    from razorctl.system import c_compiler

    if FUNCTION.fullmatch(model) and not model.startswith(models.prefixes()):
        result = _profile_function(ctx, model, recipe, flags)
        print_result(ctx, result, view.show)
        return result
    settings = given_settings(ctx, flags, recipe)
    chosen = settings.recipe
    effects.note_settings(ctx, chosen)
    of_job = {name: settings.given[name] for name in JOB_SETTINGS if name in settings.given}
    # The settings are checked before torch is loaded, which takes seconds.
    with planning.lookup_status(model):
        name = models.find(model, of_job.get("task")).name
    job = Job(name, dataset or "random", steps=timed_steps, **of_job)
    if dataset is not None:
        planning.check_data(job)
    elif of_data := [name for name in DATA_SETTINGS if name in of_job and _given(ctx, name)]:
        flag = of_data[0].replace("_", "-")
        raise UsageError(f"--{flag} is for reading a data set; name one, or leave it out.")
    c_compiler.start(device)
    with views.status(f"profiling {model}") as at:
        from razorctl.training.profiler import profile as measure

        if dataset is None:
            of_job = {n: value for n, value in of_job.items() if n not in DATA_SETTINGS}
        result = measure(
            model,
            chosen,
            dataset=dataset,
            steps=timed_steps,
            device=device,
            trace=trace,
            snapshot=snapshot,
            progress=at,
            **of_job,
        ).result()
    print_result(ctx, result, view.show)
    return result


def _profile_function(
    ctx: Call, model: str, recipe: str | None, flags: dict[str, Any]
) -> dict[str, Any]:
    """The bytes of the model that module:function returns."""
    sizes = [flags.get(name) for name in ("batch_size", "input_size")]
    settings = _module_settings(ctx, recipe, flags, OF_FUNCTION)
    with views.status(f"loading {model}") as at:
        from razorctl.training import imported_models

        net, inputs = imported_models.load(model, *sizes)
        at(f"tracing {model}")
        return _trace(settings, net, inputs) | {"model": model}


def profile_module(
    ctx: Call, net: Any, inputs: Any, forward: Any = None, **flags: Any
) -> dict[str, Any]:
    """The bytes of any nn.Module, in the document of `profile`."""
    settings = _module_settings(ctx, flags.pop("recipe", None), flags, OF_MODULE)
    with views.status(f"tracing {type(net).__name__}"):
        return _trace(settings, net, inputs, forward)


def _module_settings(
    ctx: Call, recipe: str | None, flags: dict[str, Any], allowed: Collection[str]
) -> Settings:
    """The settings for an nn.Module; raises UsageError for those that are not allowed."""
    from razorctl.cli import effects

    for name in ctx.params:
        if name not in allowed and _given(ctx, name):
            word = {"timed_steps": "steps"}.get(name, name.replace("_", " "))
            raise UsageError(
                f"{word} does not apply to a model of your own, which is only traced; leave it out."
            )
    settings = given_settings(ctx, flags, recipe)
    effects.note_settings(ctx, settings.recipe)
    return settings


def _trace(settings: Settings, net: Any, inputs: Any, forward: Any = None) -> dict[str, Any]:
    from razorctl.registry import find
    from razorctl.step import DTYPES
    from razorctl.training.kept_bytes import trace_kept_bytes

    precision = settings.given.get("precision", "auto")
    precision = "fp32" if precision == "auto" else precision
    autocast = find("precision", precision, DTYPES)
    recipe = settings.recipe if settings.orders else None
    traced = trace_kept_bytes(net, inputs, recipe, autocast=autocast, forward=forward)
    return {**traced.result(), "precision": precision}


def _given(ctx: Call, name: str) -> bool:
    """Whether the call itself gives a parameter."""
    return is_given(ctx, name) and ctx.params[name] is not None
