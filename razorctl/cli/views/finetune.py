"""The output of `finetune`: the header, the settings of the run, and the table of its result."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from razorctl.cli.views import common as views
from razorctl.cli.views.common import (
    epochs_of,
    figure,
    packing_summary,
    predicted_duration,
    recipe_summary,
)
from razorctl.config.defaults import MANY
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.models import RenderedChat
from razorctl.models.boxes import DRAWN
from razorctl.units import against, count, duration, size

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from razorctl.training.run import Run


def show_header(job: Job, recipe: Recipe, out: "Path | None", device: str | None) -> None:
    """Prints the settings that are known before anything is loaded, and the run directory.

    out: the run directory; None for a dry run.
    """
    title = f"{views.title(job.model, job.dataset)}: {recipe_summary(asdict(recipe))}"
    views.say(", ".join([title, *_header(job, device)]))
    if out is not None:
        views.say(f"run directory: {out}")


def show_settings(run: "Run", job: Job, header_device: str | None, device: str) -> None:
    """Prints the settings that the header lacked, and the bytes stored for backward.

    Args:
        run: the prepared run.
        job: the job of the header.
        header_device: the device of the header, if it had one.
        device: the name of the run's device.
    """
    printed = _header(job, header_device)
    epochs = epochs_of(run.job.steps or 0, run.steps_per_epoch)
    new = [words for words in _settings(run.job, device, epochs) if words not in printed]
    if run.predicted is not None:
        left = (run.job.steps or 0) - len(run.history)
        average = run.predicted["average_share"]
        new.append(f"{predicted_duration(run.predicted, left * average)} as planned")
    if new:
        views.say(", ".join(new))
    drawn = f", both with {DRAWN} objects in each image" * (run.job.task == "detection")
    views.say(
        f"activations stored for backward: {size(run.saved_bytes)}; full fine-tuning stores "
        f"{size(run.full_saved_bytes)}{drawn}"
    )
    if run.packing is not None:
        views.say(packing_summary(asdict(run.packing), bool(run.job.packing)))
    if epochs > MANY:
        views.note(
            f"the run has {count(epochs, 'epoch')}; for this number of rows, --epochs "
            f"{run.usual_epochs:g} is usual."
        )
    if run.stock:
        views.note(f"{run.stock}.")
    if run.history:
        views.say(f"resuming from step {len(run.history):,} of {run.job.steps:,}")


def show_sample(sample: RenderedChat) -> None:
    """Prints a conversation as the model reads it; [[ ]] mark the text that is trained."""
    if not sample.templated:
        views.note(
            "the tokenizer has no chat template; conversations are written as below, and the "
            "model is saved with this template."
        )
    views.say("the first conversation as the model reads it; [[ ]] mark the trained text:")
    text = "".join(f"[[{part}]]" if trained else part for part, trained in sample.parts)
    for line in text.strip().splitlines():
        views.say(f"  {line}")


def show_dry_run(result: Mapping[str, Any]) -> None:
    """Prints the first training rows as text, and that nothing was trained."""
    for number, row in enumerate(result["rows"], 1):
        views.line(f"row {number}: {row}")
    title = views.title(result["model"], result["dataset"])
    views.line(f"dry run of {title}: nothing was trained or written.")


def _header(job: Job, device: str | None) -> list[str]:
    """The settings of a job that does not know its device, which decides about CUDA graphs."""
    return _settings(replace(job, cuda_graphs=None), device)


def _settings(job: Job, device: str | None, epochs: float | None = None) -> list[str]:
    """The settings of a job in words, without those that are None.

    epochs: shown in place of the job's.
    """
    epochs = job.epochs if epochs is None else epochs
    words = []
    if job.batch_size is not None:
        words.append(f"batch {job.batch_size}")
        if job.accumulate > 1:
            words[0] += f" in {count(job.accumulate, 'micro-batch')}"
    if job.processes > 1:
        words.append(f"{count(job.processes, 'process')} ({job.strategy})")
    if epochs is not None:
        words.append(count(epochs, "epoch"))
    if job.steps is not None:
        words.append(count(job.steps, "step"))
    if job.precision != "auto":
        words.append(job.precision)
    if job.learning_rate is not None:
        words.append(f"lr {job.learning_rate:g}")
    if job.compile:
        words.append("compiled")
    if job.cuda_graphs:
        words.append("CUDA graphs")
    if device is not None:
        words.append(f"on {device}")
    return words


def show(result: dict[str, Any]) -> None:
    """Prints the table of a finished run."""
    title = f"{views.title(result['model'], result['dataset'])}: {recipe_summary(result['recipe'])}"
    views.line(title)
    table = views.facts_table("", "dim")
    stored, full = result["saved_bytes"], result["full_saved_bytes"]
    predicted = result["predicted"] or {}
    remark = against(stored, full)
    if result["compiled"]:
        remark += ", without compiling"
    table.add_row("stored for backward", size(stored), remark)
    table.add_row("full fine-tuning stores", size(full))
    if result["peak_bytes"] is not None:
        table.add_row("peak of a step", size(result["peak_bytes"]), "allocated")
    if predicted:
        table.add_row("peak as planned", size(predicted["peak_bytes"]), "predicted")
    if result["stopped_early"]:
        reason = f"no better {result['metric'].replace('_', ' ')}"
        table.add_row("stopped early", f"step {result['steps']:,}", reason)
    for change in result["out_of_memory"][-1:]:
        table.add_row("out of memory", f"step {change['step']:,}", "later steps need less")
    table.add_row("step", duration(result["step_seconds"]), f"median of {result['steps']:,}")
    if payoff := result["payoff"]:
        from razorctl.training.payoff import Payoff  # imported here: few runs compile

        table.add_row("compiling", duration(payoff["compile_seconds"]), Payoff(**payoff).verdict)
    if predicted:
        table.add_row("step as planned", predicted_duration(predicted), "predicted")
    if result["epoch_seconds"] is not None:
        table.add_row("epoch", duration(result["epoch_seconds"]), f"on {result['device']}")
    if result.get("validation_accuracy") is not None:
        loss = f"loss {figure(result['validation_loss'])}"
        table.add_row("validation accuracy", figure(result["validation_accuracy"]), loss)
    for name in dict.fromkeys(("accuracy", result["metric"])):
        if name != "loss" and name in result["metrics"]:
            _add_figure(table, name, result)
    views.out.print(table)
    files = [f"weights: {result['best_weights']}"]
    if result["best_weights"] != result["weights"]:
        files = [f"{files[0]} (of step {result['best_step']:,}, the best)"]
        files.append(f"last weights: {result['weights']}")
    for line in files:
        views.line(line)


def _add_figure(table: "Table", name: str, result: dict[str, Any]) -> None:
    """Adds a figure of the best weights, and of the last weights if the best are older."""
    evaluations = [(result["metrics"], "")]
    if result["best_weights"] != result["weights"]:
        of_best = f" (step {result['best_step']:,}, the best)"
        evaluations = [(result["best_metrics"], of_best), (result["metrics"], " (the last step)")]
    label = f"{result['split']} {name.replace('_', ' ')}"
    for figures, which in evaluations:
        loss = f"loss {figure(figures.get('loss'))}{which}"
        table.add_row(label, figure(figures.get(name)), loss)
        label = ""
