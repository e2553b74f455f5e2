"""The output of `doctor`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from razorctl.cli.views import common as views

if TYPE_CHECKING:
    from razorctl.training.doctor import Check

MARKS = {"ok": Text("ok", "green"), "note": Text("note", "yellow"), "problem": Text("bad", "red")}


def show(checks: "Sequence[Check]") -> None:
    """Prints a row for each check with its mend; all versions are one row, as are all kernels."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    shared: dict[str, list[str]] = {}
    for check in checks:
        if check.state == "ok" and (check.group == "software" or check.found == "ran"):
            text = check.name if check.found == "ran" else f"{check.name} {check.found}"
            text += f" (tested: {' to '.join(check.tested)})" if check.tested else ""
            shared.setdefault(check.group, []).append(text)
        else:
            text = check.found if check.mend is None else f"{check.found}; {check.mend}"
            table.add_row(MARKS[check.state], f"{check.group}: {check.name}", Text(text))
    for group, texts in shared.items():
        table.add_row(MARKS["ok"], group, Text(", ".join(texts)))
    views.out.print(table)
