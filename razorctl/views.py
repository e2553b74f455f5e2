"""What a terminal shows: tables on stdout, the live bar and messages on stderr."""

import json
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

if TYPE_CHECKING:
    from razorctl.trainer import Run

out = Console()
err = Console(stderr=True)


def size(count: int) -> str:
    """Bytes as GiB, or MiB and KiB below one of them."""
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if count >= 1 << power:
            return f"{count / (1 << power):,.2f} {unit}"
    return f"{count / 1024:,.1f} KiB"


def duration(seconds: float) -> str:
    """Seconds as ms, s or min."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def against(part: int, whole: int) -> str:
    """How much less than `whole` `part` is, in percent."""
    return f"{1 - part / whole:.0%} less" if part <= whole else f"{part / whole - 1:.0%} more"


def error(message: str) -> None:
    """One sentence on stderr, on one line however narrow the terminal."""
    err.print("[bold red]error:[/]", escape(message), highlight=False, soft_wrap=True)


def print_json(document: Any) -> None:
    # Plain print: rich would wrap and colour what a program is to read.
    print(json.dumps(document, indent=2))


def follow(run: "Run") -> None:
    """Trains to the end under a live bar of 80 columns; silent where there is no terminal."""
    saved = f"saves {size(run.saved_bytes)}, {against(run.saved_bytes, run.full_saved_bytes)}"
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("loss {task.fields[loss]} acc {task.fields[accuracy]}"),
        TextColumn(f"[green]{saved}"),
        TextColumn("{task.fields[rate]}/s"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=run.job.steps, loss="-", accuracy="-", rate="-")
        for step in run:
            rate = f"{step.samples_per_second:,.0f}"
            bar.update(task, completed=step.step, loss=f"{step.loss:.2f}", rate=rate)
            if step.accuracy is not None:
                bar.update(task, accuracy=f"{step.accuracy:.3f}")


def show_result(result: dict[str, Any]) -> None:
    """The closing table of `finetune`."""
    recipe = result["recipe"]
    title = f"{result['model']} on {result['dataset']}: {recipe['method']}"
    if recipe["method"] != "full":
        title += f", ratio {recipe['ratio']:g}"
    if recipe["joint_budget"] < 1:
        what = recipe["joint"] if recipe["joint"] == "branches" else "joint budget"
        title += f", {what} {recipe['joint_budget']:g}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_column(style="dim")
    saved, full = result["saved_bytes"], result["full_saved_bytes"]
    table.add_row("saved for backward", size(saved), against(saved, full))
    table.add_row("full fine-tuning saves", size(full))
    if result["peak_bytes"] is not None:
        table.add_row("peak of a step", size(result["peak_bytes"]), "allocated")
    table.add_row("step", duration(result["step_seconds"]), f"median of {result['steps']:,}")
    table.add_row("epoch", duration(result["epoch_seconds"]), f"on {result['device']}")
    table.add_row("test accuracy", f"{result['accuracy']:.4f}", f"loss {result['loss']:.4f}")
    out.print(table)
    out.print(f"weights: {result['weights']}", soft_wrap=True, highlight=False, markup=False)


def show_plan(plan: dict[str, Any], explain: bool) -> None:
    """The table of `plan`, from its JSON document: a row for each way, the chosen one marked."""
    job, gpu, budget = plan["job"], plan["gpu"], plan["budget_bytes"]
    title = (
        f"{job['model']} on {job['dataset']}: batch {job['batch_size']}, {job['precision']}, "
        f"{job['optimizer']}; {gpu['name']}, {size(budget)}"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("GiB")
    for name in ("model", "saved", "other", "needs", "room", "step", "epoch"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("gradient")
    chosen = plan["chosen"]
    for entry in plan["candidates"]:
        predicted = entry["predicted"]
        fixed = sum(predicted[f"{part}_bytes"] for part in ("weights", "gradients", "optimizer"))
        needs = predicted["peak_bytes"] + predicted["reserve_bytes"]
        saved = predicted["peak_bytes"] - fixed - predicted["transient_bytes"]
        seconds = predicted["step_seconds"]
        figures = (fixed, saved, needs - fixed - saved, needs, budget - needs)
        table.add_row(
            ("> " if entry == chosen else "  ") + entry["label"],
            *(f"{figure / 2**30:.2f}" for figure in figures),
            duration(seconds),
            duration(seconds * plan["steps_per_epoch"]),
            "exact" if entry["exact"] else "approximate",
            style="bold green" if entry == chosen else None if entry["fits"] else "dim",
        )
    out.print(table)
    if explain:
        for i, line in enumerate(plan["explanation"], start=1):
            out.print(f"{i}. {line}", highlight=False)
        out.print()
    reserve = size(chosen["predicted"]["reserve_bytes"])
    other = f"other: inputs, temporaries and {reserve} for context and fragmentation."
    out.print(f"Predicted; {other} {_others(plan)}", highlight=False, style="dim")
    out.print(plan["command"], soft_wrap=True, highlight=False, markup=False)


def _others(plan: dict[str, Any]) -> str:
    """What the other preferences would have chosen, and what that gains."""
    chosen, words = plan["chosen"], []
    for prefer, entry in plan["others"].items():
        if entry is None:
            words.append(f"--prefer {prefer}: nothing fits.")
        elif entry["label"] != chosen["label"]:
            seconds = entry["predicted"]["step_seconds"] / chosen["predicted"]["step_seconds"]
            gradient = "exact" if entry["exact"] else "approximate"
            words.append(
                f"--prefer {prefer}: {entry['label']}, {gradient}, {seconds:.2f} times the step."
            )
        else:
            words.append(f"--prefer {prefer}: the same.")
    return " ".join(words)


def show_names(groups: dict[str, dict[str, str]]) -> None:
    """The table of `list`: group -> name -> summary."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="dim")
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for group, names in groups.items():
        for i, (name, summary) in enumerate(names.items()):
            table.add_row("" if i else group, name, summary)
        table.add_section()
    out.print(table)
