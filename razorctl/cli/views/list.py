"""What `list` prints."""

from rich.table import Table
from rich.text import Text

from razorctl.cli.views import common as views


def show(groups: dict[str, dict[str, str]], brief: bool) -> None:
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
    views.out.print(table)
    if brief:
        more = "In full: razorctl list models, datasets, methods, gpus or recipes."
        views.out.print(more, style="dim", highlight=False)
