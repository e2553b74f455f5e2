"""What `evaluate` prints."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from razorctl import units
from razorctl.cli.views import common as views

SHOWN = 10  # bad rows that are named


def skipped(lines: Sequence[str], more: str = "") -> None:
    """A note on bad rows that are left out, which names the first; more: what else it says."""
    if not lines:
        return
    verb = "is" if len(lines) == 1 else "are"
    views.note(f"{units.count(len(lines), 'bad row')} {verb} left out{more}:")
    named = list(dict.fromkeys(lines))  # streams are read several times
    for line in named[:SHOWN]:
        views.say(f"  {line}")
    if len(named) > SHOWN:
        views.say(f"  and {len(named) - SHOWN:,} more")


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
    views.out.print(f"weights: {result['weights']}", soft_wrap=True, highlight=False, markup=False)
