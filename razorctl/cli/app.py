"""The command line: parses, calls and shows; nothing is computed here.

Settings come from, in this order: flag, RAZORCTL_<NAME> in the environment, the [job] and
[recipe] tables of razorctl.toml, the measured default of the model or method.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from razorctl import __version__
from razorctl.cli import effects, progress
from razorctl.cli.views import common as views
from razorctl.cli.views import comparison as comparison_view
from razorctl.cli.views import profile as profile_view
from razorctl.config import presets
from razorctl.config.registry import find, unknown
from razorctl.config.settings import read_toml
from razorctl.errors import NoFitError, RazorError, Terminated, UsageError
from razorctl.job import Job, settle_precision
from razorctl.methods import METHODS
from razorctl.recipe import Recipe
from razorctl.training import rundir
from razorctl.training.signals import sigterm_raises

OF_OPTIMIZER = ("learning_rate", "momentum", "weight_decay")  # which suit one alone
PROJECT_FILE = Path("razorctl.toml")
INTERRUPTED, OUT_OF_MEMORY = 130, 4


class Group(TyperGroup):
    """Turns errors into one sentence and the exit code that stands for their kind."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with sigterm_raises():
                return super().invoke(ctx)
        except (typer.TyperException, typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt as stop:
            views.error(_ending("interrupted", stop))
            raise typer.Exit(INTERRUPTED) from None
        except Terminated as stop:
            views.error(_ending("terminated", stop))
            raise
        except Exception as error:
            if ctx.params.get("debug") or _nobody_reads(error):
                raise
            views.error(_sentence(error))
            raise typer.Exit(_exit_code(error)) from None


def _nobody_reads(error: Exception) -> bool:
    """Whether that is because who read our output has read enough, which typer ends in silence."""
    if isinstance(error, BrokenPipeError):
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            return True
    return False


def _ending(word: str, stop: BaseException) -> str:
    """That a command was stopped, and what that leaves, which stands in the notes."""
    return f"{': '.join([word, *getattr(stop, '__notes__', [])])}."


def _exit_code(error: Exception) -> int:
    if isinstance(error, RazorError):
        return error.exit_code
    return OUT_OF_MEMORY if type(error).__name__ == "OutOfMemoryError" else 1


def _sentence(error: Exception) -> str:
    if isinstance(error, RazorError):
        return str(error)
    if _exit_code(error) == OUT_OF_MEMORY:
        return "the device is out of memory; raise --ratio or lower --batch-size."
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{reason} (razorctl --debug shows where)"


SETTINGS = {"auto_envvar_prefix": "RAZORCTL", "help_option_names": ["-h", "--help"]}
Option = partial(typer.Option, show_envvar=False)
app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=SETTINGS,
)


def _settings(file: Path) -> dict[str, Any]:
    """The [job] and [recipe] tables of a razorctl.toml or a run's config.toml, as one mapping."""
    known = [field.name for field in (*fields(Job), *fields(Recipe))]
    tables = read_toml(file)
    settings: dict[str, Any] = {}
    for table in ("recipe", "job"):
        if not isinstance(tables.get(table, {}), dict):
            raise UsageError(
                f"{table} in {file} is not a table; write [{table}] above its settings."
            )
        settings |= tables.get(table, {})
    for name in settings:
        if name not in known:
            raise unknown(f"setting in {file}", name, known)
    return settings


def _preset(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The settings of a recipe preset, by name or file, with what is given on top."""
    file = Path(name) if name.endswith(".toml") else find("recipe", name, presets.files("recipes"))
    settings = _settings(file)
    if "steps" in given or "epochs" in given:  # two ways to say the same
        settings = {k: v for k, v in settings.items() if k not in ("steps", "epochs")}
    if given.get("optimizer", Job.optimizer) != settings.get("optimizer", Job.optimizer):
        settings = {k: v for k, v in settings.items() if k not in OF_OPTIMIZER}
    return settings | given


def _note_effects(ctx: typer.Context, *settings: Recipe | Job) -> None:
    """Says which settings do nothing in any of these.

    Only of those that the user gave: a default in a file, as a run's config.toml has them, is none.
    """
    defaults = {field.name: field.default for field in (*fields(Job), *fields(Recipe))}
    given = {name for name, value in (ctx.obj or {}).items() if value != defaults[name]}
    for name in ctx.params.keys() & defaults.keys():
        source = ctx.get_parameter_source(name)
        if source is not None and source.name in ("COMMANDLINE", "ENVIRONMENT"):
            given.add(name)
    first, *others = (effects.without_effect(given, each) for each in settings)
    for sentence in first:
        if all(sentence in other for other in others):
            views.note(sentence)


def _note_variables(ctx: typer.Context) -> None:
    """Says which variables of the environment look like settings and are none."""
    assert isinstance(ctx.command, TyperGroup)
    commands = (ctx.command, *ctx.command.commands.values())
    options = (o for c in commands for o in c.params if o.param_type_name == "option")
    known = {option.name for option in options if option.name}
    prefix = f"{SETTINGS['auto_envvar_prefix']}_"
    for variable in sorted(os.environ):
        name = variable.removeprefix(prefix).lower()
        if variable.startswith(prefix) and name not in known:
            views.note(f"{variable} does nothing: {unknown('setting', name, known)}")


def _version(wanted: bool) -> None:
    if wanted:
        views.out.print(f"razorctl {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        Option(help="Settings in TOML, such as a run's config.toml. [default: razorctl.toml]"),
    ] = None,
    debug: Annotated[bool, Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Fine-tune whole pretrained models on consumer GPUs.

    The forward pass stays exact; only what the gradient needs is saved for the backward pass.
    """
    _note_variables(ctx)
    file = config or (PROJECT_FILE if PROJECT_FILE.exists() else None)
    if file is not None and isinstance(ctx.command, TyperGroup):
        ctx.obj = _settings(file)
        ctx.default_map = dict.fromkeys(ctx.command.commands, ctx.obj)


def _known() -> dict[str, dict[str, str]]:
    """Group -> name -> summary of all that a user may name."""
    from razorctl import data
    from razorctl import models as families
    from razorctl.planning import gpus

    return {
        "models": {name: model.summary for name, model in families.models().items()},
        "data sets": {name: source.summary for name, source in data.DATASETS.items()},
        "methods": {name: f"{m.summary} ({m.source})" for name, m in METHODS.items()},
        "gpus": {name: gpus.load(name).name for name in gpus.names()},
        "recipes": {
            name: str(read_toml(file).get("summary", ""))
            for name, file in presets.files("recipes").items()
        },
    }


def _completes(group: str) -> Callable[[str], list[str]]:
    """What a shell offers where a name of that group is half typed."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in _known()[group] if name.startswith(incomplete)]

    return complete


MODEL = typer.Argument(
    help="Name of a model; `razorctl list` shows them.", autocompletion=_completes("models")
)
ModelName = Annotated[str | None, MODEL]
DatasetName = Annotated[
    str | None, typer.Argument(help="Name of a data set.", autocompletion=_completes("data sets"))
]
RecipeName = Annotated[
    str | None,
    Option(
        "--recipe",
        help="Settings by a preset's name; `razorctl list recipes` shows them.",
        autocompletion=_completes("recipes"),
    ),
]
MethodName = Annotated[
    str | None,
    Option(help="What survives of each activation.", autocompletion=_completes("methods")),
]
Ratio = Annotated[float | None, Option(help="Share that is pruned; of razor, of bytes; in [0, 1).")]
JointBudget = Annotated[
    float | None, Option(help="Share of blocks with a gradient each step, in (0, 1].")
]
Joint = Annotated[str | None, Option(help="Those blocks: weights or branches. [default: weights]")]
Attention = Annotated[
    str | None, Option(help="stored, flash or sparse-flash. [default: the method's]")
]
MeanCorrection = Annotated[
    bool | None, Option(help="Keep the mean of each column exactly, prune only the rest.")
]
Unbiased = Annotated[
    bool | None, Option(help="Scale kept gradients by 1 / p. [default: the method's]")
]
Int8WeightGrad = Annotated[
    bool | None, Option(help="Weight gradients of linear layers in int8. [default: the method's]")
]
Int8InputGrad = Annotated[
    bool | None, Option(help="Input gradients of linear layers in int8. [default: the method's]")
]
InputSize = Annotated[
    int | None, Option(help="Pixels of an image's side, or tokens. [default: the model's]")
]
BatchSize = Annotated[int | None, Option(help="Examples in a step.")]
Precision = Annotated[
    str | None, Option(help="fp32, bf16 or fp16. [default: what suits the device]")
]
OptimizerName = Annotated[str | None, Option("--optimizer", help="sgd or adamw. [default: sgd]")]
GpuName = Annotated[
    str | None,
    Option(
        "--gpu",
        help="A card by its preset's name or file. [default: detected]",
        autocompletion=_completes("gpus"),
    ),
]
Vram = Annotated[str | None, Option(help="Memory that may be used, such as 11GB.")]
Prefer = Annotated[str | None, Option(help="balanced, exact or fast. [default: balanced]")]
MaxRatio = Annotated[
    float | None, Option(help="Largest ratio that may be planned. [default: 0.95]")
]
Steps = Annotated[int | None, Option(help="Optimizer steps.")]
Epochs = Annotated[float | None, Option(help="Passes over the data, not steps.")]
LearningRate = Annotated[float | None, Option("--lr", help="Highest learning rate.")]
Momentum = Annotated[float | None, Option(help="Of SGD.")]
WarmupSteps = Annotated[int | None, Option(help="Steps of rising learning rate.")]
ClipNorm = Annotated[float | None, Option(help="Largest norm of the gradient.")]
WeightDecay = Annotated[float | None, Option(help="Of the optimizer.")]
EvaluateEvery = Annotated[int | None, Option(help="Steps between evaluations.")]
Seed = Annotated[int | None, Option(help="Of classifier, data order and draws.")]
Device = Annotated[str | None, Option(help="cpu, cuda or cuda:N. [default: cuda if any]")]
Json = Annotated[bool, Option("--json", help="Print one JSON document.")]


def _select(kind: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """What is given of the fields of Job or of Recipe."""
    return {field.name: given[field.name] for field in fields(kind) if field.name in given}


PLANNING = {"gpu", "vram", "prefer", "max_ratio"}  # settings that say what to plan for


def _plan(given: dict[str, Any], place: Any = None) -> Any:
    """The plan for the card, the memory and the preference that are given, to be run on `place`."""
    from razorctl.planning import gpus
    from razorctl.planning import plan as planner

    index = 0 if place is None else place.index or 0
    gpu, budget, source, assumed = gpus.target(given.get("gpu"), given.get("vram"), index)
    if assumed and not given.get("json"):
        views.note(f"{gpu.name} is assumed from --vram alone; --gpu names another card.")
    job, settled = Job(**_select(Job, given)), _select(Recipe, given)
    if settled.keys() == {"seed"}:  # which is the job's too, and no recipe
        settled = {}
    _check_place(settle_precision(job.precision, gpu.compute_capability), place, gpu.name)
    search = {name: given[name] for name in ("prefer", "max_ratio") if name in given}
    with views.planning(gpu.name, budget, source) as report:
        return planner.plan(
            job,
            gpu,
            budget=budget,
            recipe=Recipe(**settled) if settled else None,
            report=report,
            **search,
        )


def _check_place(precision: str, place: Any, plan: str) -> None:
    """Raises UsageError if what is planned cannot run there, before anything is read or built."""
    if place is not None and place.type != "cuda" and precision == "fp16":
        raise UsageError(
            f"the plan for {plan} is in fp16, which cannot be trained on {place.type}; plan with "
            "--precision bf16 or fp32."
        )


def _settle(given: dict[str, Any], device: str | None) -> tuple[Job, Recipe, dict[str, Any] | None]:
    """Job and recipe as they are given, or else planned, and the document of a plan.

    A recipe, or a part of one, is an order. Without any the job is planned for the card that it
    runs on, if that is known.
    """
    if not {"model", "dataset"} <= given.keys():
        raise UsageError("name a model and a data set, as in: finetune vit-micro digits.")
    job, recipe = Job(**_select(Job, given)), Recipe(**_select(Recipe, given))
    from razorctl import data
    from razorctl.planning import gpus

    data.check(job)  # before torch is loaded, which takes seconds
    if not {"gpu", "vram"} & given.keys():
        found = () if device == "cpu" else gpus.detect()
        if _select(Recipe, given).keys() - {"seed"} or not found:
            for name in PLANNING & given.keys():
                views.note(f"{name.replace('_', ' ')} does nothing where nothing is planned.")
            return job, recipe, None
    with views.waiting("looking for the device"):
        from razorctl import devices

        place = devices.find(device)
    if not {"gpu", "vram"} & given.keys():
        cards = found[place.index or 0 :] if place.type == "cuda" else ()
        if not cards or gpus.preset_for(cards[0]) is None:
            views.note(f"nothing is planned: no preset is known for {devices.name(place)}.")
            return job, recipe, None
    planned = _plan(given, place)
    card = f"{planned.gpu.name}, {views.size(planned.budget)}"
    views.say(f"planned for {card}: {planned.chosen.label}, {planned.reason}.")
    return planned.planned_job, planned.planned_recipe, planned.document()


@app.command(context_settings=SETTINGS)
def plan(
    ctx: typer.Context,
    model: ModelName = "vit-b16",
    dataset: DatasetName = None,
    vram: Vram = None,
    gpu: GpuName = None,
    recipe: RecipeName = None,
    method: MethodName = None,
    ratio: Ratio = None,
    joint_budget: JointBudget = None,
    joint: Joint = None,
    attention: Attention = None,
    mean_correction: MeanCorrection = None,
    unbiased: Unbiased = None,
    int8_weight_grad: Int8WeightGrad = None,
    int8_input_grad: Int8InputGrad = None,
    input_size: InputSize = None,
    batch_size: BatchSize = None,
    precision: Precision = None,
    optimizer: OptimizerName = None,
    steps: Steps = None,
    epochs: Epochs = None,
    learning_rate: LearningRate = None,
    momentum: Momentum = None,
    weight_decay: WeightDecay = None,
    warmup_steps: WarmupSteps = None,
    clip_norm: ClipNorm = None,
    evaluate_every: EvaluateEvery = None,
    seed: Seed = None,
    prefer: Prefer = None,
    max_ratio: MaxRatio = None,
    explain: Annotated[
        bool, Option("--explain", help="Say what was tried, in which order.")
    ] = False,
    json: Json = False,
) -> None:
    """Say how MODEL fits a card on DATASET, what that takes, and which way to take.

    Training steps are traced, on no device: the exact ways are listed beside the approximate ones.
    With a method or any other setting of a recipe, only that recipe is planned.
    """
    flags = {name: value for name, value in locals().items() if value is not None}
    given = {**(ctx.obj or {}), **flags}
    if recipe is not None:
        given = _preset(recipe, given)
    if "dataset" not in given:
        from razorctl import data

        given["dataset"] = data.usual(given["model"])
    try:
        planned = _plan(given)
    except NoFitError as error:
        if json:
            views.print_json(error.document)
        else:
            views.show_ways(error.document)
        raise
    document = planned.document()
    for settings in (planned.planned_recipe, planned.planned_job):
        _note_effects(ctx, settings)
    if json:
        views.print_json(document)
    else:
        views.show_plan(document, explain)


@app.command(context_settings=SETTINGS)
def finetune(
    ctx: typer.Context,
    model: ModelName = None,
    dataset: DatasetName = None,
    plan: Annotated[Path | None, Option(help="File of `plan --json`: run exactly that.")] = None,
    vram: Vram = None,
    gpu: GpuName = None,
    prefer: Prefer = None,
    max_ratio: MaxRatio = None,
    recipe: RecipeName = None,
    method: MethodName = None,
    ratio: Ratio = None,
    joint_budget: JointBudget = None,
    joint: Joint = None,
    attention: Attention = None,
    mean_correction: MeanCorrection = None,
    unbiased: Unbiased = None,
    int8_weight_grad: Int8WeightGrad = None,
    int8_input_grad: Int8InputGrad = None,
    steps: Steps = None,
    epochs: Epochs = None,
    input_size: InputSize = None,
    batch_size: BatchSize = None,
    accumulate: Annotated[
        int | None, Option(help="Micro-batches that a step's gradient adds up over. [default: 1]")
    ] = None,
    precision: Precision = None,
    optimizer: OptimizerName = None,
    learning_rate: LearningRate = None,
    momentum: Momentum = None,
    weight_decay: WeightDecay = None,
    warmup_steps: WarmupSteps = None,
    clip_norm: ClipNorm = None,
    evaluate_every: EvaluateEvery = None,
    seed: Seed = None,
    device: Device = None,
    out: Annotated[Path | None, Option(help="New run directory. [default: under runs/]")] = None,
    json: Json = False,
) -> None:
    """Fine-tune MODEL on DATASET and write the run to a directory.

    The directory gets config.toml, metrics.jsonl, model.safetensors and, at the end, result.json.
    A setting that is not given has the measured default of the model or method. With --vram or
    --gpu the run is planned first, and on CUDA it is held to that memory; --plan runs what a file
    says.
    """
    flags = {name: value for name, value in locals().items() if value is not None}
    given = {**(ctx.obj or {}), **flags}
    if recipe is not None:
        given = _preset(recipe, given)
    document: dict[str, Any] | None
    if plan is not None:
        from razorctl.planning.plan import read

        job, chosen, document = read(plan)
        settled = [*_select(Job, flags), *_select(Recipe, flags), *(PLANNING & flags.keys())]
        if other := [name for name in settled if getattr(job, name, None) != flags[name]]:
            raise UsageError(
                f"{plan} settles {other[0].replace('_', ' ')}; leave it out, or plan again."
            )
        from razorctl import devices

        _check_place(job.precision, devices.find(device), str(plan))
    else:
        job, chosen, document = _settle(given, device)
    _note_effects(ctx, chosen)
    directory = rundir.choose(out, job.model, job.dataset, chosen.method)

    def prepare(at: Callable[[str], None]) -> Any:
        from razorctl.training import run as trainer

        run = trainer.finetune(
            job, chosen, out=directory, device=device, plan=document, progress=at
        )
        _note_effects(ctx, run.job)  # whose steps may be the model's
        return run

    result = progress.train(prepare, job, chosen, directory, device).result()
    if json:
        views.print_json(result)
    else:
        views.show_result(result)


@app.command(context_settings=SETTINGS)
def profile(
    ctx: typer.Context,
    model: Annotated[str, MODEL],
    method: MethodName = None,
    ratio: Ratio = None,
    joint_budget: JointBudget = None,
    joint: Joint = None,
    attention: Attention = None,
    mean_correction: MeanCorrection = None,
    unbiased: Unbiased = None,
    int8_weight_grad: Int8WeightGrad = None,
    int8_input_grad: Int8InputGrad = None,
    input_size: InputSize = None,
    batch_size: BatchSize = None,
    precision: Precision = None,
    optimizer: OptimizerName = None,
    timed_steps: Annotated[int, Option("--steps", help="Steps that are timed.")] = 5,
    device: Device = None,
    trace: Annotated[Path | None, Option(help="File for a chrome trace of two steps.")] = None,
    snapshot: Annotated[
        Path | None, Option(help="File for what CUDA allocates in two steps.")
    ] = None,
    json: Json = False,
) -> None:
    """Show where the bytes and the time of a training step of MODEL go.

    Saved bytes, and what full fine-tuning would save, are traced; times are of real steps with
    fresh weights and random batches, so that nothing is downloaded.
    """
    flags = {name: value for name, value in locals().items() if value is not None}
    given = {**(ctx.obj or {}), **flags}
    from razorctl import models as families

    recipe = Recipe(**_select(Recipe, given))
    _note_effects(ctx, recipe)
    of_job = ("batch_size", "input_size", "precision", "optimizer")
    settings = {name: given[name] for name in of_job if name in given}
    # Refused before torch is loaded, which takes seconds.
    Job(families.find(given["model"]).name, "random", steps=timed_steps, **settings)
    with views.waiting(f"profiling {given['model']}"):
        from razorctl.training.profiler import profile as measure

        result = measure(
            given["model"],
            recipe,
            steps=timed_steps,
            device=device,
            trace=trace,
            snapshot=snapshot,
            **settings,
        ).result()
    if json:
        views.print_json(result)
    else:
        profile_view.show(result)


@app.command(context_settings=SETTINGS)
def compare(
    ctx: typer.Context,
    what: Annotated[
        list[str], typer.Argument(metavar="MODEL DATASET | DIR...", show_default=False)
    ],
    methods: Annotated[
        str, Option(help="Names of methods, or full-stored, full-flash, accumulate.")
    ] = "full,checkpoint,backrazor,prebackrazor++,razor",
    seeds: Annotated[int, Option(help="Runs of each method.")] = 1,
    target: Annotated[
        float | None, Option(help="Accuracy to reach. [default: 99 % of full's best]")
    ] = None,
    ratio: Ratio = None,
    steps: Steps = None,
    epochs: Epochs = None,
    input_size: InputSize = None,
    batch_size: BatchSize = None,
    precision: Precision = None,
    optimizer: OptimizerName = None,
    learning_rate: LearningRate = None,
    weight_decay: WeightDecay = None,
    evaluate_every: EvaluateEvery = None,
    device: Device = None,
    out: Annotated[Path | None, Option(help="New directory. [default: under runs/]")] = None,
    resume: Annotated[
        bool, Option("--resume", help="Go on in --out; what is finished there is kept.")
    ] = False,
    json: Json = False,
    csv: Annotated[bool, Option("--csv", help="Print the rows as CSV.")] = False,
) -> None:
    """Compare methods on MODEL and DATASET, or what is in directories: finished runs, comparisons.

    Every method and seed runs in a process of its own, as `finetune` would; one that fails has its
    reason in its row. Of the [recipe] settings only the ratio counts: methods run as they come.
    """
    flags = {name: value for name, value in locals().items() if value is not None}
    given = {**(ctx.obj or {}), **flags}
    if json and csv:
        raise UsageError("json and csv are two forms of the same; give one of them.")
    if target is not None and not 0 < target <= 1:
        raise UsageError(f"target {target:g} is outside (0, 1]; accuracy is a share, such as 0.95.")
    from razorctl.training import comparison

    there = [comparison.is_run(Path(name)) or comparison.is_grid(Path(name)) for name in what]
    if all(there):
        for name in flags.keys() - {"ctx", "what", "target", "json", "csv"}:
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                raise UsageError(
                    f"runs that are finished take no other {name.replace('_', ' ')}; leave it out."
                )
        found = comparison.finished(map(Path, what))
    elif len(what) != 2 or any(there):
        raise UsageError(
            f"{what[there.index(False)]} is no directory of a run or of a comparison; name a model "
            "and a data set, or such directories alone."
        )
    else:
        if resume and out is None:
            raise UsageError("there is nothing to resume; name the comparison with --out.")
        given |= {"model": what[0], "dataset": what[1]}
        job = Job(**_select(Job, given))
        with views.waiting(f"preparing to compare on {job.model} and {job.dataset}"):
            from razorctl.training.grid import Grid

            grid = Grid(
                job,
                methods.split(","),
                ratio=given.get("ratio", Recipe.ratio),
                seeds=seeds,
                device=device,
                out=out,
                resume=resume,
            )
        _note_effects(ctx, *grid.recipes.values())
        _note_effects(ctx, grid.resolved)
        progress.compare(grid)
        found = grid.comparison
    document = found.document(target)
    if json:
        views.print_json(document)
    elif csv:
        comparison_view.print_csv(document["rows"])
    else:
        comparison_view.show(document)
    raise typer.Exit(found.exit_code)


@app.command("list", context_settings=SETTINGS)
def list_names(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="models, datasets, methods, gpus or recipes: all that is said of each."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show the models, data sets, methods and GPUs known by name, or all of one KIND in full."""
    groups = _known()
    if kind is not None:
        group = find("kind", kind, {name.replace(" ", ""): name for name in groups})
        groups = {group: groups[group]}
    if json:
        views.print_json(groups)
    else:
        views.show_names(groups, brief=kind is None)


def run() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    run()
