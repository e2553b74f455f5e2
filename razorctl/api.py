"""The functions of the library, which the commands of the same names call."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from razorctl.cli import (
    comparing,
    finetuning,
    planning,
    profiling,
)
from razorctl.cli import names as naming
from razorctl.cli.calls import call, model_name, public
from razorctl.cli.comparing import METHODS
from razorctl.cli.results import Result
from razorctl.cli.views import comparison as comparison_view
from razorctl.cli.views import finetune as finetune_view
from razorctl.cli.views import list as list_view
from razorctl.cli.views import plan as plan_view
from razorctl.cli.views import profile as profile_view
from razorctl.cli.views import report
from razorctl.config.keywords import (
    ComparedSettings,
    PlannedSettings,
    Prefer,
    ProfiledSettings,
    TrainingSettings,
)
from razorctl.config.recipe import Recipe
from razorctl.errors import ArgumentTypeError, UsageError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from pandas import DataFrame
    from torch import Tensor, nn

    Rows: TypeAlias = DataFrame | Dataset | Sequence[Mapping[str, Any]]

Name = str | os.PathLike[str]  # of a model or a data set, which may be a path


@public
def finetune(
    model: Name | None = None,
    dataset: "Name | Rows | DatasetDict | None" = None,
    *,
    recipe: Recipe | Name | None = None,
    plan: Name | None = None,
    vram: str | None = None,
    gpu: Name | None = None,
    prefer: Prefer | None = None,
    host_memory: str | None = None,
    out: Name | None = None,
    resume: bool = False,
    dry_run: bool = False,
    tracker: str | Sequence[str] = (),
    device: str | None = None,
    progress: bool = True,
    **settings: Unpack[TrainingSettings],
) -> Result:
    """Fine-tunes a model on a data set, like `razorctl finetune`.

        razorctl.finetune("vit-micro", "digits", ratio=0.9)

    The run is planned first with `vram` or `gpu`. On CUDA it is also planned without a recipe.

    Args:
        model: name of a model; None with `plan` or `resume`.
        dataset: name of a data set, hf:ORG/NAME, or a folder or table of your own; or rows: a
            pandas DataFrame, a Dataset or DatasetDict of datasets, or a list of dicts. Rows are
            written to the cache of datasets, which `resume` reads again.
        recipe: a Recipe, or the name or file of a preset; settings override it.
        plan: file of `razorctl plan --json` to run.
        vram: memory that a plan may use, such as "11GB"; None is all free memory.
        gpu: name or file of a GPU preset to plan for; None is this machine's.
        prefer: "exact" gradients only, "fast", or "balanced", the default.
        host_memory: memory of the host that optimizer state may take, such as "64GB"; None is what
            this machine has free, or any with `gpu`.
        out: new directory of the run; None is one under runs/.
        resume: continue the run in `out`, or start there if it is new.
        dry_run: prepare the run and stop; the result has its settings and a sample of its rows.
        tracker: one or several of "tensorboard", "trackio" and "wandb".
        device: "cpu", "cuda" or "cuda:N"; None is cuda if available.
        progress: whether messages and progress are printed on stderr.
        settings: fields of `razorctl.Recipe` and `razorctl.Job`; None is the default.

    Returns:
        The keys of `finetune --json`, such as `result["test_accuracy"]`; `result["run_dir"]` has
        the model in the format of timm or transformers. A notebook shows a table with curves.

    Raises:
        UsageError: a setting that cannot be used.
        NoFitError: no way to train fits the memory.
        ArgumentTypeError: a TypeError and UsageError, for a model or data of another type.
        RazorError: any other error of `razorctl.errors`, such as OutOfMemoryError or DataError.
    """
    dataset = _stored(dataset)
    planned = {"vram": vram, "gpu": gpu, "prefer": prefer, "host_memory": host_memory}
    this = call(settings, recipe, model=model, dataset=dataset, **planned)
    trackers = [tracker] if isinstance(tracker, str) else tracker
    document = finetuning.finetune(this, _path(plan), _path(out), trackers, device, resume, dry_run)
    if document.get("dry_run"):
        return Result(document, finetune_view.show_dry_run)
    return Result(document, finetune_view.show, partial(report.run_plots, document))


@public
def plan(
    model: Name = "vit-b16",
    dataset: "Name | Rows | DatasetDict | None" = None,
    *,
    recipe: Recipe | Name | None = None,
    vram: str | None = None,
    gpu: Name | None = None,
    prefer: Prefer | None = None,
    host_memory: str | None = None,
    progress: bool = True,
    **settings: Unpack[PlannedSettings],
) -> Result:
    """Plans how to train a model on a data set on a card, like `razorctl plan`.

        razorctl.plan("vit-b16", "cifar100", gpu="rtx-4090")

    Training steps are traced, which needs no GPU. With a recipe, or a field of one, only this
    recipe is planned.

    Args:
        model: name of a model.
        dataset: as for `finetune`; None is a usual one of the model's task.
        recipe, vram, gpu, prefer, host_memory, progress, settings: as for `finetune`.

    Returns:
        The keys of `plan --json`: `result["chosen"]` is the way to take, with predicted bytes and
        seconds, and `result["candidates"]` all that were tried. A notebook shows them as a table.

    Raises:
        UsageError: a setting that cannot be used.
        NoFitError: nothing fits; its `needed` is in bytes, its `document` has what was tried.
    """
    dataset = _stored(dataset)
    planned = {"vram": vram, "gpu": gpu, "prefer": prefer, "host_memory": host_memory}
    this = call(settings, recipe, model=model, dataset=dataset, **planned)
    return Result(planning.document(this), partial(plan_view.show, explain=False))


@public
def compare(
    *what: "Name | Rows | DatasetDict",
    methods: str | Sequence[str] = METHODS,
    seeds: int = 1,
    budget: str | None = None,
    target: float | None = None,
    vram: str | None = None,
    gpu: Name | None = None,
    out: Name | None = None,
    resume: bool = False,
    html: Name | None = None,
    device: str | None = None,
    progress: bool = True,
    **settings: Unpack[ComparedSettings],
) -> Result:
    """Compares methods on a model and a data set, or finished runs, like `razorctl compare`.

        razorctl.compare("vit-micro", "digits", methods=["full", "razor"], lr=[0.01, 0.1])

    Args:
        what: a model and a data set as for `finetune`, or directories of runs and comparisons.
        methods: names of methods or baselines, as a sequence or with commas.
        seeds: number of runs of each method.
        budget: time after which no new run starts, such as "10m".
        target: score to reach, such as an accuracy of 0.95; None is 99 % of the best of full.
        vram: memory of a card, such as "11GB", that a method must fit to be the one to take.
        gpu: name or file of a GPU preset, whose memory that is without `vram`.
        out: new directory; None is one under runs/.
        resume: continue in `out`; finished runs are not repeated.
        html: new file for a report with plots.
        device, progress: as for `finetune`.
        settings: of the runs; a sequence of numbers runs each method with every number.

    Returns:
        The keys of `compare --json`: `result["rows"]` has a row for each method, with the error of
        a failed run. A notebook shows the table with the plots of the report.

    Raises:
        UsageError: a setting that cannot be used, or does not apply to finished runs.
    """
    if not what:
        raise UsageError("nothing is named; name a model and a data set, or directories of runs.")
    options = {
        "methods": methods if isinstance(methods, str) else ",".join(methods),
        "seeds": seeds,
        "budget": budget,
        "device": device,
        "out": _path(out),
        "resume": resume,
    }
    names = [str(model_name(each, "compare")) for each in what[:1]]
    names += [str(_stored(each)) for each in what[1:]]
    card = {"vram": vram, "gpu": None if gpu is None else os.fspath(gpu)}
    runs = comparing.compare(
        call(settings), names, options, target=target, html=_path(html), **card
    )
    plots = partial(report.comparison_plots, runs.document, runs.comparison)
    return Result(runs.document, comparison_view.show, plots, runs.exit_code)


@public
def profile(
    model: "Name | nn.Module",
    dataset: "Name | Tensor | tuple[Any, ...] | Mapping[str, Any] | None" = None,
    *,
    inputs: "Tensor | tuple[Any, ...] | Mapping[str, Any] | None" = None,
    forward: Callable[[Any, Any], Any] | None = None,
    recipe: Recipe | Name | None = None,
    steps: int = 5,
    trace: Name | None = None,
    snapshot: Name | None = None,
    device: str | None = None,
    progress: bool = True,
    **settings: Unpack[ProfiledSettings],
) -> Result:
    """Profiles a training step of a model by name, or the bytes that any nn.Module stores.

        razorctl.profile("vit-b16", ratio=0.9)
        razorctl.profile(net, torch.zeros(32, 3, 224, 224), ratio=0.9)

    An nn.Module is neither run nor changed: the bytes that its modules store for backward are
    traced, with `full` and with the recipe. The recipe of a sparsified module is its own.

    Args:
        model: name of a model, or an nn.Module.
        dataset: data set of the batches, which are random without it; inputs of an nn.Module.
        inputs: of an nn.Module: a tensor, a tuple of arguments or a mapping of keywords, real or on
            the meta device.
        forward: called as `forward(model, inputs)` in place of an nn.Module; may return a loss.
        recipe, device, progress: as for `finetune`.
        steps: number of timed steps.
        trace: file for a Chrome trace of two steps.
        snapshot: file for a CUDA memory snapshot of two steps.
        settings: of the step; an nn.Module takes `precision` and fields of `razorctl.Recipe`.

    Returns:
        The keys of `profile --json`: `result["rows"]` has the bytes of each module, and
        `result["totals"]` their sums. A notebook shows them, and the times, as tables.

    Raises:
        UsageError: a setting that cannot be used, or does not apply to an nn.Module.
    """
    this = call(settings, recipe)
    options = {"steps": steps, "device": device, "trace": trace, "snapshot": snapshot}
    if isinstance(model, (str, os.PathLike)):
        if inputs is not None or forward is not None:
            raise UsageError(
                "inputs are for an nn.Module; leave them out, or give the model itself."
            )
        options["dataset"] = dataset if dataset is None else str(dataset)
        return Result(profiling.profile(this, os.fspath(model), options), profile_view.show)
    from torch import nn

    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ArgumentTypeError(f"{kind} is neither the name of a model nor an nn.Module.")
    tensors = dataset if inputs is None else inputs
    document = profiling.profile_module(this, model, options, tensors, forward)
    return Result(document, profile_view.show)


@public
def list(kind: str | None = None, model: str | None = None, dataset: str | None = None) -> Result:  # noqa: A001
    """The names of models, data sets, methods, GPUs and recipes, like `razorctl list`.

        razorctl.list("models")

    kind: "models", "datasets", "methods", "gpus" or "recipes"; or "defaults", the default training
    settings of a model on a data set, or on its usual one. Returns the keys of `list --json`.
    Raises UsageError for an unknown name.
    """
    if kind == naming.DEFAULTS:
        if model is None:
            raise UsageError("list defaults needs a model, as in: list defaults vit-micro digits.")
        from razorctl.cli import defaults

        with planning.lookup_status(model):
            return Result(defaults.defaults_of(model, dataset), list_view.show_defaults)
    names = naming.listed(kind)
    if model is not None:
        raise UsageError(f"{model} does nothing without defaults; leave it out.")
    return Result(names, partial(list_view.show, brief=kind is None))


def _stored(dataset: Any) -> Any:
    """The name of a data set; rows in memory are written to the cache."""
    if dataset is None or isinstance(dataset, (str, os.PathLike)):
        return dataset
    from razorctl.data.own import in_memory

    return in_memory.stored(dataset)


def _path(name: Name | None) -> Path | None:
    return None if name is None else Path(name)
