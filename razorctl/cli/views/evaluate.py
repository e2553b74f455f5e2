"""The output of `evaluate`."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from razorctl import units
from razorctl.cli.views import classes
from razorctl.cli.views import common as views

SHOWN = 10  # bad rows that are listed


def note_skipped(lines: Sequence[str], remark: str = "") -> None:
    """Prints a note with `remark` on the bad rows that are left out, and lists the first ones."""
    if not lines:
        return
    verb = "is" if len(lines) == 1 else "are"
    views.note(f"{units.count(len(lines), 'bad row')} {verb} left out{remark}:")
    for line in lines[:SHOWN]:
        views.say(f"  {line}")
    if len(lines) > SHOWN:
        views.say(f"  and {len(lines) - SHOWN:,} more")


def show(result: dict[str, Any]) -> None:
    """The table of `evaluate`."""
    split = f", {result['split']} split" if result["split"] else ""
    title = views.title(result["model"], result["dataset"])
    rows = units.count(result["rows"], "row")
    views.out.print(f"{title}{split}: {rows}", soft_wrap=True, highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in result["metrics"].items():
        table.add_row(name.replace("_", " "), f"{value:.4f}")
    views.out.print(table)
    if result["by_class"] is not None:
        classes.show(result["classes"], result["by_class"])
    views.out.print(f"weights: {result['weights']}", soft_wrap=True, highlight=False, markup=False)
