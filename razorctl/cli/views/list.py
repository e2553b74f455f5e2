"""The output of `list`."""

from typing import Any

from rich.table import Table
from rich.text import Text

from razorctl.cli.views import common as views
from razorctl.units import count


def show(groups: dict[str, dict[str, str]], brief: bool) -> None:
    """Prints all names by group; brief: one line for each name, and no recipes."""
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
            cells: list[str | Text] = [name, text]
            if brief:
                cells.insert(0, "" if i else group)
            table.add_row(*cells)
    views.out.print(table)
    if brief:
        more = "In full: razorctl list models, datasets, methods, gpus or recipes."
        views.out.print(more, style="dim", highlight=False)


# Setting -> the text for a value of None.
NONE = {"input_size": "the model's", "patience": "none"}


def show_defaults(document: dict[str, Any]) -> None:
    """Prints the table of `list defaults`: each setting with its value and source."""
    rows = document["rows"]
    size = "" if rows is None else f", {count(rows, 'row')} to train on"
    views.out.print(f"{views.title(document['model'], document['dataset'])}{size}", highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_column(style="dim")
    for entry in document["defaults"]:
        name, value = entry["setting"], entry["value"]
        shown = str(value)
        if value is None:
            shown = NONE.get(name, "by the number of rows")
        elif isinstance(value, int | float):
            shown = f"{value:,.0f}" if value == round(value) else f"{value:.3g}"
        table.add_row(name.replace("_", " "), shown, entry["from"])
    views.out.print(table)
