"""What a terminal shows: tables on stdout, the live bar and messages on stderr."""

import csv
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.status import Status
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from razorctl.grid import Grid
    from razorctl.grid import Progress as Standing
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


def waiting(text: str) -> Status:
    """While inside it, says so on a terminal; silent where there is none."""
    return err.status(text)


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


def _summary(recipe: dict[str, Any]) -> str:
    """Method, ratio and joint budget, as far as they say something."""
    text = str(recipe["method"])
    if recipe["method"] != "full":
        text += f", ratio {recipe['ratio']:g}"
    if recipe["joint_budget"] < 1:
        what = recipe["joint"] if recipe["joint"] == "branches" else "joint budget"
        text += f", {what} {recipe['joint_budget']:g}"
    return text


def show_result(result: dict[str, Any]) -> None:
    """The closing table of `finetune`."""
    title = f"{result['model']} on {result['dataset']}: {_summary(result['recipe'])}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_column(style="dim")
    saved, full = result["saved_bytes"], result["full_saved_bytes"]
    predicted = result["predicted"] or {}
    table.add_row("saved for backward", size(saved), against(saved, full))
    table.add_row("full fine-tuning saves", size(full))
    if result["peak_bytes"] is not None:
        table.add_row("peak of a step", size(result["peak_bytes"]), "allocated")
    if predicted:
        table.add_row("peak as planned", size(predicted["peak_bytes"]), "predicted")
    table.add_row("step", duration(result["step_seconds"]), f"median of {result['steps']:,}")
    if predicted:
        table.add_row("step as planned", duration(predicted["step_seconds"]), "predicted")
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
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    table.add_column("  GiB")
    for name in ("model", "saved", "other", "needs", "room", "step", "epoch"):
        table.add_column(name, justify="right", no_wrap=True)
    chosen = plan["chosen"]
    for entry in plan["candidates"]:
        predicted = entry["predicted"]
        fixed = sum(predicted[f"{part}_bytes"] for part in ("weights", "gradients", "optimizer"))
        needs = predicted["peak_bytes"] + predicted["reserve_bytes"]
        saved = predicted["peak_bytes"] - fixed - predicted["transient_bytes"]
        seconds = predicted["step_seconds"]
        figures = (fixed, saved, needs - fixed - saved, needs, budget - needs)
        table.add_row(
            ("> " if entry == chosen else "  ") + entry["label"] + ("" if entry["exact"] else " ≈"),
            *(f"{figure / 2**30:.2f}" for figure in figures),
            duration(seconds),
            duration(seconds * plan["steps_per_epoch"]),
            style="bold green" if entry == chosen else None if entry["fits"] else "dim",
        )
    out.print(table)
    if explain:
        for i, line in enumerate(plan["explanation"], start=1):
            out.print(f"{i}. {line}", highlight=False)
        out.print()
    reserve = size(chosen["predicted"]["reserve_bytes"])
    out.print(
        f"All predicted. ≈: approximate gradient. other: inputs, temporaries, and {reserve} for "
        f"context and fragmentation. {_others(plan)}",
        highlight=False,
        style="dim",
    )
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


def follow_grid(grid: "Grid") -> None:
    """Runs all of a grid under a live bar; silent where there is no terminal."""
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None)

        def report(at: "Standing") -> None:
            steps = "starting" if at.steps is None else f"step {at.step:,} of {at.steps:,}"
            text = f"{at.method}, seed {at.seed}: {steps}"
            done = at.run + at.step / (at.steps or 1)
            bar.update(task, total=at.runs, completed=done, description=text)

        grid.run(report)


MEMORY = {"peak_bytes": "peak", "saved_bytes": "saved"}
MIB, GIB = ("MiB", 2.0**20), ("GiB", 2.0**30)


def show_comparison(document: dict[str, Any]) -> None:
    """The table of `compare`, from its JSON document: a row for each way, the best figures bold."""
    rows, memory, target = document["rows"], document["memory"], document["target"]
    # Name of a figure -> the column's head, what a unit of it is, and the format.
    columns = {
        memory: _column(rows, memory, MEMORY[memory], MIB, GIB),
        "memory_vs_full": ("of full", 0.01, "{:,.1f}%"),
        "step_seconds": _column(rows, "step_seconds", "step", ("ms", 1e-3), ("s", 1)),
        "speedup_vs_full": ("speed\nup", 1, "{:.2f}x"),
        "epoch_seconds": _column(rows, "epoch_seconds", "epoch", ("s", 1), ("min", 60)),
        "accuracy": ("accuracy\n%", 0.01, "{:.2f}"),
        "time_to_target": _column(rows, "time_to_target", "target", ("s", 1), ("min", 60)),
    }
    shared = document["shared"]
    words = [f"{document['model']} on {document['dataset']}"]
    for form, name in (("batch {}", "batch_size"), ("{:,} steps", "steps"), ("{}", "precision")):
        words += [form.format(shared[name])] if name in shared else []
    count = len(document["seeds"])
    words += [f"{count} seed{'s' * (count != 1)}", *document["devices"]]
    table = Table(
        title=", ".join(words),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column()
    table.add_column("method", overflow="fold")
    for head, _, _ in columns.values():
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        cells = ["*" if row["pareto"] else "", escape(row["label"])]
        for name, (_, unit, form) in columns.items():
            text = "-" if row[name] is None else form.format(row[name] / unit)
            if name == "accuracy" and row["accuracy_std"] is not None:
                text += f" ± {row['accuracy_std'] / unit:.2f}"
            cells.append(f"[bold]{text}[/]" if name in row["best"] else text)
        table.add_row(*cells, style=None if row["seeds"] else "dim")
    out.print(table, "", sep="\n")
    for row in rows:
        if row["error"] is not None:
            out.print(f"{row['label']}: {row['error']}", style="red", highlight=False, markup=False)
    how = "measured peak of a step" if memory == "peak_bytes" else "saved for backward, traced"
    notes = f"Bold: the best. *: Pareto front of memory, step time and accuracy. Memory: {how}. "
    if target is not None:
        notes += f"target: training until accuracy stays at {target:.2%} or more."
    out.print(notes, style="dim", highlight=False)


def _column(
    rows: list[dict[str, Any]], name: str, head: str, *units: tuple[str, float]
) -> tuple[str, float, str]:
    """Head, size and format of the largest unit that the largest figure has more than one of."""
    largest = max((row[name] for row in rows if row[name] is not None), default=0)
    unit, size = next((u for u in reversed(units) if largest >= u[1]), units[0])
    return f"{head}\n{unit}", size, "{:,.1f}" if size == units[0][1] else "{:,.2f}"


def print_csv(rows: list[dict[str, Any]]) -> None:
    """A line for each row, of all that is one figure or word."""
    names = [name for name, value in rows[0].items() if not isinstance(value, list)]
    writer = csv.DictWriter(sys.stdout, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def show_names(groups: dict[str, dict[str, str]], brief: bool) -> None:
    """The table of `list`: group -> name -> summary; if `brief`, a line each, without recipes."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    if brief:
        table.add_column(style="dim", no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for group, names in groups.items():
        if brief and group == "recipes":
            continue
        for i, (name, summary) in enumerate(names.items()):
            text = Text(summary, no_wrap=brief, overflow="ellipsis" if brief else None)
            table.add_row(*["" if i else group][:brief], name, text)
    out.print(table)
    if brief:
        more = "In full: razorctl list models, datasets, methods, gpus or recipes."
        out.print(more, style="dim", highlight=False)


Bytes = dict[tuple[str, ...], tuple[int, int]]  # labels -> bytes saved, and saved in full
LARGEST = 15  # modules, with their like in other blocks, in a row of their own
PHASES = {
    "data_s": "a random batch, made and moved",
    "forward_s": "with the loss, without sampling",
    "sampling_s": "choosing and packing what is kept",
    "backward_s": "",
    "optimizer_s": "with clipping",
}


def show_profile(result: dict[str, Any]) -> None:
    """The tables of `profile`: bytes by layer kind and by module, the peak, and time by phase."""
    out.print(
        f"{result['model']}: {_summary(result['recipe'])}, batch of {result['batch_size']:,}, "
        f"{result['precision']}, {result['optimizer']}, on {result['device']}",
        highlight=False,
        markup=False,
    )
    saved, full = result["by_kind"], result["by_kind_full"]
    by_size = sorted(full, key=full.__getitem__, reverse=True)
    kinds: Bytes = {(kind,): (saved[kind], full[kind]) for kind in by_size}
    _show_bytes("saved for backward, traced", ("kind of layer",), kinds)
    _show_bytes("the same by module", ("module", "", "kind"), _largest(result["rows"]))

    table = _table("peak of a step", "", "bytes")
    for name, count in result["peak_bytes"].items():
        if count is not None:
            table.add_row(name.replace("_", ", "), size(count))
    out.print(table)

    table = _table(f"time of a step, median of {result['steps']:,}", "phase", "time", "share", "")
    for name, note in PHASES.items():
        seconds = result["phases"][name]
        share = f"{seconds / result['step_s']:.1%}"
        table.add_row(name.removesuffix("_s"), duration(seconds), share, f"[dim]{note}")
    table.add_section()
    table.add_row("step", duration(result["step_s"]))
    out.print(table)


def _largest(rows: list[dict[str, Any]]) -> Bytes:
    """The largest of `rows`, by name, number of them and layer kind; the others in one.

    Those that differ only in the numbers in their names, as the blocks of a model do, are one.
    """
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        name = ".".join("*" if part.isdigit() else part for part in row["module"].split("."))
        groups.setdefault((name, row["kind"]), []).append(row)
    sums: Bytes = {}
    for (name, kind), group in groups.items():
        several = f"{len(group)} x" if len(group) > 1 else ""
        labels = (name if several else group[0]["module"]) or "(the model)", several, kind
        sums[labels] = _sums((row["saved_bytes"], row["full_saved_bytes"]) for row in group)
    largest = sorted(sums, key=sums.__getitem__, reverse=True)
    shown = {labels: sums[labels] for labels in largest[:LARGEST]}
    if rest := largest[LARGEST:]:
        shown["others", "", ""] = _sums(sums[labels] for labels in rest)
    return shown


def _sums(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    first, second = zip(*pairs, strict=True)
    return sum(first), sum(second)


def _show_bytes(title: str, labels: tuple[str, ...], entries: Bytes) -> None:
    """A row for each entry and one for their sum."""
    room = max(16, out.width - 61)
    total = _sums(entries.values())
    table = _table(title, *labels, "dense", "pruned", "smaller", "share")
    for (name, *others), pair in entries.items():
        # The end of a long name tells it from others.
        end = name if len(name) <= room else f"…{name[1 - room :]}"
        table.add_row(end, *others, *_compared(*pair, total[0]))
    table.add_section()
    table.add_row("total", *[""] * (len(labels) - 1), *_compared(*total, total[0]))
    out.print(table)


def _compared(saved: int, full: int, total: int) -> tuple[str, ...]:
    times = f"{full / saved:.1f}x" if full and saved else "-"
    return size(full), size(saved), times, f"{saved / total:.0%}" if total else "-"


def _table(title: str, *columns: str) -> Table:
    """A table whose figures stand to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True)
    for name in columns:
        figures = name in ("dense", "pruned", "smaller", "share", "bytes", "time")
        table.add_column(name, justify="right" if figures else "left", no_wrap=True)
    return table
