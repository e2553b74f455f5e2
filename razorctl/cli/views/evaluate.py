"""The output of `evaluate`."""

from collections.abc import Sequence
from typing import Any

from razorctl import units
from razorctl.cli.views import classes
from razorctl.cli.views import common as views

SHOWN = 10  # bad rows that are listed


def note_skipped(lines: Sequence[str], remark: str = "") -> None:
    """Prints a note on the bad rows that are left out, and the first SHOWN of their lines.

    remark: added to the note.
    """
    if not lines:
        return
    verb = "is" if len(lines) == 1 else "are"
    views.note(f"{units.count(len(lines), 'bad row')} {verb} left out{remark}:")
    for line in lines[:SHOWN]:
        views.say(f"  {line}")
    if len(lines) > SHOWN:
        views.say(f"  and {len(lines) - SHOWN:,} more")


def show(result: dict[str, Any]) -> None:
    """Prints the figures of `evaluate`."""
    split = f", {result['split']} split" if result["split"] else ""
    title = views.title(result["model"], result["dataset"])
    rows = units.count(result["rows"], "row")
    views.line(f"{title}{split}: {rows}")
    table = views.facts_table("")
    for name, value in result["metrics"].items():
        table.add_row(name.replace("_", " "), f"{value:.4f}")
    views.out.print(table)
    if result["by_class"] is not None:
        classes.show(result["classes"], result["by_class"])
    views.line(f"weights: {result['weights']}")
