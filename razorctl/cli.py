"""The command line: parses, calls and shows; nothing is computed here.

Settings come from, in this order: flag, RAZORCTL_<NAME> in the environment, the [job] and
[recipe] tables of razorctl.toml, the measured default of the model or method.
"""

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from razorctl import __version__, views
from razorctl.errors import RazorError, UsageError
from razorctl.job import Job
from razorctl.recipe import METHODS, Recipe
from razorctl.registry import unknown
from razorctl.settings import read_toml

PROJECT_FILE = Path("razorctl.toml")
INTERRUPTED, OUT_OF_MEMORY = 130, 4


class Group(TyperGroup):
    """Turns errors into one sentence and the exit code that stands for their kind."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.TyperException, typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            views.error("interrupted.")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if ctx.params.get("debug"):
                raise
            views.error(_sentence(error))
            raise typer.Exit(_exit_code(error)) from None


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
    add_completion=False,
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
    file = config or (PROJECT_FILE if PROJECT_FILE.exists() else None)
    if file is not None and isinstance(ctx.command, TyperGroup):
        ctx.obj = _settings(file)
        ctx.default_map = dict.fromkeys(ctx.command.commands, ctx.obj)


@app.command(context_settings=SETTINGS)
def finetune(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Name of a model; `razorctl list` shows them.")],
    dataset: Annotated[str, typer.Argument(help="Name of a data set.")],
    method: Annotated[str | None, Option(help="What survives of each activation.")] = None,
    ratio: Annotated[
        float | None, Option(help="Share that is pruned; of razor, of bytes; in [0, 1).")
    ] = None,
    joint_budget: Annotated[
        float | None, Option(help="Share of blocks with a gradient each step, in (0, 1].")
    ] = None,
    joint: Annotated[
        str | None, Option(help="Those blocks: weights or branches. [default: weights]")
    ] = None,
    attention: Annotated[
        str | None, Option(help="stored, flash or sparse-flash. [default: the method's]")
    ] = None,
    mean_correction: Annotated[
        bool | None, Option(help="Keep the mean of each column exactly, prune only the rest.")
    ] = None,
    unbiased: Annotated[
        bool | None, Option(help="Scale kept gradients by 1 / p. [default: the method's]")
    ] = None,
    steps: Annotated[int | None, Option(help="Optimizer steps.")] = None,
    epochs: Annotated[float | None, Option(help="Passes over the data, not steps.")] = None,
    batch_size: Annotated[int | None, Option(help="Examples in a step.")] = None,
    learning_rate: Annotated[float | None, Option("--lr", help="Highest learning rate.")] = None,
    momentum: Annotated[float | None, Option(help="Of SGD.")] = None,
    weight_decay: Annotated[float | None, Option(help="Of SGD.")] = None,
    warmup_steps: Annotated[int | None, Option(help="Steps of rising learning rate.")] = None,
    clip_norm: Annotated[float | None, Option(help="Largest norm of the gradient.")] = None,
    evaluate_every: Annotated[int | None, Option(help="Steps between evaluations.")] = None,
    seed: Annotated[int | None, Option(help="Of classifier, data order and draws.")] = None,
    device: Annotated[
        str | None, Option(help="cpu, cuda or cuda:N. [default: cuda if any]")
    ] = None,
    out: Annotated[Path | None, Option(help="New run directory. [default: under runs/]")] = None,
    json: Annotated[bool, Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Fine-tune MODEL on DATASET and write the run to a directory.

    The directory gets config.toml, metrics.jsonl and model.safetensors. A setting that is not
    given has the measured default of the model or method.
    """
    flags = {name: value for name, value in locals().items() if value is not None}
    given = {**(ctx.obj or {}), **flags}
    from razorctl.trainer import finetune as prepare

    job = Job(**{f.name: given[f.name] for f in fields(Job) if f.name in given})
    recipe = Recipe(**{f.name: given[f.name] for f in fields(Recipe) if f.name in given})
    run = prepare(job, recipe, out=out, device=device)
    views.follow(run)
    if json:
        views.print_json(run.result())
    else:
        views.show_result(run.result())


@app.command(context_settings=SETTINGS)
def profile(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Name of a model; `razorctl list` shows them.")],
    method: Annotated[str | None, Option(help="What survives of each activation.")] = None,
    ratio: Annotated[
        float | None, Option(help="Share that is pruned; of razor, of bytes; in [0, 1).")
    ] = None,
    joint_budget: Annotated[
        float | None, Option(help="Share of blocks with a gradient each step, in (0, 1].")
    ] = None,
    joint: Annotated[
        str | None, Option(help="Those blocks: weights or branches. [default: weights]")
    ] = None,
    attention: Annotated[
        str | None, Option(help="stored, flash or sparse-flash. [default: the method's]")
    ] = None,
    batch_size: Annotated[int | None, Option(help="Examples in a step.")] = None,
    timed_steps: Annotated[int, Option("--steps", help="Steps that are timed.")] = 5,
    device: Annotated[
        str | None, Option(help="cpu, cuda or cuda:N. [default: cuda if any]")
    ] = None,
    trace: Annotated[Path | None, Option(help="File for a chrome trace of two steps.")] = None,
    snapshot: Annotated[
        Path | None, Option(help="File for what CUDA allocates in two steps.")
    ] = None,
    json: Annotated[bool, Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show where the bytes and the time of a training step of MODEL go.

    Saved bytes, and what full fine-tuning would save, are traced; times are of real steps with
    fresh weights and random batches, so that nothing is downloaded.
    """
    flags = {name: value for name, value in locals().items() if value is not None}
    given = {**(ctx.obj or {}), **flags}
    from razorctl.profiler import profile as measure

    recipe = Recipe(**{f.name: given[f.name] for f in fields(Recipe) if f.name in given})
    with views.waiting(f"profiling {model}"):
        result = measure(
            model,
            recipe,
            batch_size=batch_size,
            steps=timed_steps,
            device=device,
            trace=trace,
            snapshot=snapshot,
        ).result()
    if json:
        views.print_json(result)
    else:
        views.show_profile(result)


@app.command("list", context_settings=SETTINGS)
def list_names(
    json: Annotated[bool, Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the models, data sets, methods and GPUs known by name."""
    from razorctl import data, families, gpus

    groups = {
        "models": {name: model.summary for name, model in families.models().items()},
        "data sets": {name: source.summary for name, source in data.DATASETS.items()},
        "methods": {name: f"{m.summary} ({m.source})" for name, m in METHODS.items()},
        "gpus": {name: gpus.load(name).name for name in gpus.names()},
    }
    if json:
        views.print_json(groups)
    else:
        views.show_names(groups)


def run() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    run()
