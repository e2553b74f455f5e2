"""What `evaluate` prints."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from razorctl import units
from razorctl.cli.views import common as views


def skipped(lines: Sequence[str]) -> None:
    """A note on bad rows that are left out, with a line for each."""
    if lines:
        views.note(f"{bad_rows(len(lines))} left out:")
        for line in lines:
            views.say(f"  {line}")


def bad_rows(number: int) -> str:
    """The start of a sentence on so many bad rows."""
    return f"{units.count(number, 'bad row')} {'is' if number == 1 else 'are'}"


def show(result: dict[str, Any]) -> None:
    """The table of `evaluate`."""
    split = f", {result['split']} split" if result["split"] else ""
    title = f"{result['model']} on {result['dataset']}{split}: {units.count(result['rows'], 'row')}"
    views.out.print(title, soft_wrap=True, highlight=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in result["metrics"].items():
        table.add_row(name.replace("_", " "), f"{value:.4f}")
    views.out.print(table)
    views.out.print(f"weights: {result['weights']}", soft_wrap=True, highlight=False, markup=False)
