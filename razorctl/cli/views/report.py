"""The report of `compare --html`: an HTML file that loads no others."""

import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from razorctl.cli.views import classes, html, plots
from razorctl.cli.views import common as views
from razorctl.cli.views import comparison as table
from razorctl.cli.views.terminal import clean
from razorctl.errors import RazorError
from razorctl.system.atomic import atomic_file
from razorctl.training.comparing.comparison import Comparison
from razorctl.training.comparing.curves import losses, scores
from razorctl.training.comparing.finished_run import FinishedRun, read_run
from razorctl.training.rundir import CONFIG

MEMORY = {
    "saved_bytes": "stored, traced",
    "traced_peak_bytes": "peak, traced",
    "peak_bytes": "peak, measured",
}
PLOTS = (
    "Memory and time: less is better on both axes; filled points are on the Pareto front. Thick "
    "curves are means over seeds, thin curves are single seeds. Seconds count training steps only. "
    "The loss of a long run is averaged to 100 points."
)
Command = tuple[str, Sequence[str]]  # a heading, and commands
Groups = Sequence[tuple[str, Sequence[FinishedRun]]]  # the label and the runs of each row


def write(
    file: Path,
    document: Mapping[str, Any],
    comparison: Comparison,
    commands: Sequence[Command],
    replace: bool = False,
) -> None:
    """Writes the report of a comparison atomically; raises OSError if it cannot be written.

    Args:
        file: the file to write.
        document: the JSON document of the comparison.
        comparison: the runs.
        commands: commands that repeat the comparison; commands of single runs are added.
        replace: whether an existing file is replaced.
    """
    text = render(dict(document), comparison, commands)
    with atomic_file(file, replace, "--html") as partial:
        partial.write_text(clean(text), "utf-8")


def render(document: dict[str, Any], comparison: Comparison, commands: Sequence[Command]) -> str:
    """The report as HTML; the same comparison gives the same text."""
    groups = _groups(comparison)
    runs = [run for _, group in groups for run in group]
    again = [["razorctl", "--config", str(run.directory / CONFIG), "finetune"] for run in runs]
    parts = [html.body(lambda: table.show(document, _memories(document)))]
    if runs:
        parts += [_memory_time(document), plots.curves(_panels(document["metric"], groups))]
        parts.append(html.body(lambda: _show_details(document, groups)))
    for what, lines in (*commands, ("Repeat one run", [shlex.join(words) for words in again])):
        if lines:
            parts.append(f"<h2>{what}</h2>\n<pre>{escape(chr(10).join(lines))}</pre>")
    parts.append(f"<p>Made by razorctl {document['razorctl']}.</p>")
    return html.whole(table.title(document), parts)


def _show_details(document: dict[str, Any], groups: Groups) -> None:
    """Prints an explanation of the plots, figures by class, the environment and the settings."""
    views.out.print(PLOTS)
    classes.show_compared(groups)
    runs = [run for _, group in groups for run in group]
    _show_facts("Environment", _environment(runs))
    shared = {name.replace("_", " "): value for name, value in document["shared"].items()}
    _show_facts("Settings of all runs", shared)


def _show_facts(title: str, facts: Mapping[str, Any]) -> None:
    """Prints a table of names and values, without values that are None."""
    rows = Table(title=title, show_header=False)
    for name, value in facts.items():
        if value is not None:
            if isinstance(value, bool):
                value = "yes" if value else "no"
            rows.add_row(Text(name), Text(str(value)))
    views.out.print(rows)


def _memories(document: dict[str, Any]) -> dict[str, str]:
    """The columns of memory that a row has a value in, with their heads; at least one."""
    rows = document["rows"]
    memories = {n: head for n, head in MEMORY.items() if any(row[n] is not None for row in rows)}
    return memories or {"saved_bytes": MEMORY["saved_bytes"]}


def _groups(comparison: Comparison) -> Groups:
    """The entries with runs."""
    return [(entry.label, entry.runs) for entry in comparison.entries if entry.runs]


def _memory_time(document: dict[str, Any]) -> str:
    columns, memory = table.columns_of(document, _memories(document)), document["memory"]
    _, second, _ = columns["step_seconds"]
    _, byte, _ = columns[memory]
    percent = " %" if columns["score"][0].endswith("%") else ""
    points = [
        plots.Point(
            f"{row['label']}{', does not fit' if row['fits'] is False else ''}: "
            f"{table.cell(row, 'score', columns)}{percent}",
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


def _panels(
    metric: str, groups: Groups, over: Sequence[str] = ("steps", "seconds")
) -> list[plots.Panel]:
    """The panels of the training loss and of the task's metric."""
    head, unit, _ = table.SCORES[metric]
    panels = []
    for name, curve, size in (("training loss", losses, 1.0), (_axis_name(head), scores, unit)):
        rows = [(label, [curve(run).per(size) for run in runs]) for label, runs in groups]
        panels += [plots.Panel(name, axis, rows) for axis in over]
    return panels


def write_curves(directory: Path, file: Path) -> None:
    """Writes a PNG with the loss, the score and the learning rate of a finished run.

    Raises what `read_run` raises.
    """
    run = read_run(directory)
    panels = _panels(run.figure, [("", [run])], ["steps"])
    rates = plots.Panel("learning rate", "steps", [("", [losses(run, "learning_rate")])])
    plots.write_curves([*panels, rates], file)


def run_plots(result: Mapping[str, Any]) -> list[str]:
    """The curves of a run, by its result; none if its directory cannot be read."""
    try:
        run = read_run(Path(result["run_dir"]))
    except RazorError:
        return []
    panels = _panels(run.figure, [(result["recipe"]["method"], [run])], ["steps"])
    return [plots.curves(panels)]


def comparison_plots(document: dict[str, Any], comparison: Comparison) -> list[str]:
    """The plots of a comparison, with curves over steps alone; none without a finished run."""
    groups = _groups(comparison)
    if not groups:
        return []
    panels = _panels(document["metric"], groups, ["steps"])
    return [_memory_time(document), plots.curves(panels)]


def _environment(runs: Sequence[FinishedRun]) -> dict[str, str]:
    """The environment of the runs: name -> the values of all runs, with commas."""
    names = dict.fromkeys(name for run in runs for name in run.environment)
    table = {}
    for name in names:
        values = sorted({str(run.environment[name]) for run in runs if name in run.environment})
        table[name] = ", ".join(values)
        if name == "date" and len(values) > 1:
            table[name] = f"{values[0]} to {values[-1]}"
    return table
