"""The report of `compare --html`: one self-contained HTML file."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from razorctl.atomic import atomic_file
from razorctl.cli.views import classes, plots
from razorctl.cli.views import comparison as table
from razorctl.cli.views.terminal import clean
from razorctl.training.comparing.advice import sentence
from razorctl.training.comparing.comparison import Comparison
from razorctl.training.comparing.curves import losses, scores
from razorctl.training.comparing.finished_run import FinishedRun
from razorctl.training.rundir import CONFIG

TEMPLATE = "report.html.jinja"
MEMORY = {"saved_bytes": "kept, traced", "peak_bytes": "peak, measured"}
Command = tuple[str, Sequence[str]]  # a heading, and commands


def write(
    file: Path,
    document: Mapping[str, Any],
    comparison: Comparison,
    commands: Sequence[Command],
    replace: bool = False,
) -> None:
    """Writes the report of a comparison, whole or not at all; raises OSError if it cannot.

    Args:
        file: the new file, or one that is to be replaced.
        document: the JSON document of the comparison.
        comparison: the runs.
        commands: commands that repeat it; those of single runs are added.
        replace: whether a file may be replaced.
    """
    text = render(dict(document), comparison, commands)
    with atomic_file(file, replace, "--html") as partial:
        partial.write_text(clean(text), "utf-8")


def render(document: dict[str, Any], comparison: Comparison, commands: Sequence[Command]) -> str:
    """The report as HTML; the same comparison gives the same text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here: few commands need it

    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    groups = _groups(comparison)
    runs = [run for _, group in groups for run in group]
    again = [["razorctl", "--config", str(run.directory / CONFIG), "finetune"] for run in runs]
    return pages.get_template(TEMPLATE).render(
        document=document,
        title=table.title(document),
        subtitle=table.shared_settings(document),
        advice=sentence(document["take"]),
        **_table(document),
        memory_time=_memory_time(document) if runs else None,
        curves=_curves(document["metric"], groups) if runs else None,
        several=any(len(group) > 1 for _, group in groups),
        classes=classes.compared(groups),
        environment=_environment(runs),
        shared={k: v for k, v in document["shared"].items() if v is not None},
        commands=[*commands, ("Repeat one run", [shlex.join(words) for words in again])],
    )


def _columns(document: dict[str, Any]) -> table.Columns:
    """The columns of the table, with one each for traced and measured memory, if there is any."""
    rows = document["rows"]
    memories = {n: head for n, head in MEMORY.items() if any(row[n] is not None for row in rows)}
    return table.columns_of(document, memories or {"saved_bytes": MEMORY["saved_bytes"]})


def _groups(comparison: Comparison) -> list[tuple[str, list[FinishedRun]]]:
    """The label and the runs of each row that has runs."""
    return [(entry.label, entry.runs) for entry in comparison.entries if entry.runs]


def _table(document: dict[str, Any]) -> dict[str, Any]:
    """The heads, the rows and the notes of the table."""
    columns = _columns(document)
    rows = [
        {
            "label": row["label"],
            "front": row["pareto"],
            "error": row["error"],
            "seeds": len(row["seeds"]),
            "cells": [(table.cell(row, name, columns), name in row["best"]) for name in columns],
        }
        for row in document["rows"]
    ]
    heads = [head for head, _, _ in columns.values()]
    return {"heads": heads, "rows": rows, "notes": table.explanation(document, of_target=True)}


def _memory_time(document: dict[str, Any]) -> str:
    columns, memory = _columns(document), document["memory"]
    _, second, _ = columns["step_seconds"]
    _, byte, _ = columns[memory]
    percent = " %" if columns["score"][0].endswith("%") else ""
    points = [
        plots.Point(
            f"{row['label']}: {table.cell(row, 'score', columns)}{percent}",
            row["step_seconds"] / second,
            row[memory] / byte,
            row["pareto"],
        )
        for row in document["rows"]
        if row["seeds"]
    ]
    names = (_axis_name(columns[name][0]) for name in ("step_seconds", memory))
    return plots.memory_time(points, *names)


def _axis_name(head: str) -> str:
    """The name of an axis: the head of a column with its unit."""
    name, _, unit = head.partition("\n")
    return f"{name} ({unit})" if unit else name


def _curves(
    metric: str,
    groups: Sequence[tuple[str, Sequence[FinishedRun]]],
    over: Sequence[str] = ("steps", "seconds"),
) -> str:
    """The plot of the training loss and of the task's metric; groups: as of `_groups`."""
    head, unit, _ = table.SCORES[metric]
    panels = []
    for name, curve, size in (("training loss", losses, 1.0), (_axis_name(head), scores, unit)):
        rows = [(label, [curve(run).per(size) for run in runs]) for label, runs in groups]
        panels += [plots.Panel(name, axis, rows) for axis in over]
    return plots.curves(panels)


def run_plots(run: FinishedRun) -> list[str]:
    """The plot of one run."""
    return [_curves(run.figure, [(run.result["recipe"]["method"], [run])], ["steps"])]


def comparison_plots(document: dict[str, Any], comparison: Comparison) -> list[str]:
    """The plots of a comparison, those of curves over steps alone; none without a finished run."""
    groups = _groups(comparison)
    if not groups:
        return []
    return [_memory_time(document), _curves(document["metric"], groups, ["steps"])]


def _environment(runs: Sequence[FinishedRun]) -> dict[str, str]:
    """The environment of the runs: name -> all values that any run has."""
    names = dict.fromkeys(name for run in runs for name in run.environment)
    table = {}
    for name in names:
        values = sorted({str(run.environment[name]) for run in runs if name in run.environment})
        table[name] = ", ".join(values)
        if name == "date" and len(values) > 1:
            table[name] = f"{values[0]} to {values[-1]}"
    return table
