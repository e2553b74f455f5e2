"""The output of a command as HTML, for notebooks and reports, in colors that suit any theme."""

import io
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from razorctl.cli.views import common as views
from razorctl.cli.views.terminal import CleanConsole, clean

COLORS = {"green": "#2da44e", "red": "#e5484d"}  # 3:1 or more on white and on dark grays
WIDE = 1000  # columns of a terminal that is wide enough for every table
STYLE = """<style>
.razorctl table { border-collapse: collapse; margin: .4em 0 .8em; border: 0;
  font-variant-numeric: tabular-nums; }
.razorctl caption { padding: .2em 0; font-weight: 600; text-align: left;
  color: inherit; }
.razorctl table th, .razorctl table td { padding: .2em .6em; border: 0;
  border-bottom: 1px solid rgba(127, 127, 127, .35);
  text-align: left !important; vertical-align: top; white-space: nowrap; max-width: none; }
.razorctl table .end { border-bottom-width: 2px; }
.razorctl table .right { text-align: right !important; }
.razorctl .wide { overflow-x: auto; }
.razorctl pre { overflow-x: auto; padding: .6em; background: rgba(127, 127, 127, .1); }
.razorctl img { display: block; max-width: 100%; height: auto; background: white; }
.razorctl p { margin: .3em 0; max-width: 70em; }
</style>"""

HEAD = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<style>:root { color-scheme: light dark; }
body { margin: 2em auto; padding: 0 1em; max-width: 70em; font-family: sans-serif; }</style>"""


class RecordingConsole(CleanConsole):
    """A console that records what is printed, and shows nothing."""

    def __init__(self, width: int) -> None:
        super().__init__(file=io.StringIO(), width=width, force_jupyter=False, color_system=None)
        self.printed: list[tuple[Any, str | None]] = []  # (object, style)

    def print(
        self, *shown: Any, style: Any = None, markup: bool | None = None, **settings: Any
    ) -> None:
        parts = (each for each in shown if each != "")
        self.printed += [(Text(str(each)) if markup is False else each, style) for each in parts]
        super().print(*shown, style=style, markup=markup, **settings)

    @property
    def text(self) -> str:
        """The record as plain text."""
        assert isinstance(self.file, io.StringIO)
        return "\n".join(line.rstrip() for line in self.file.getvalue().splitlines())


def record(show: Callable[[], object], width: int = WIDE) -> RecordingConsole:
    """The console with the record of what a view prints on stdout."""
    before, views.out = views.out, RecordingConsole(width)
    try:
        show()
        return views.out
    finally:
        views.out = before


def page(show: Callable[[], object], plots: Sequence[str] = ()) -> str:
    """The output of a view, and the <img> elements of plots, as one element with its style."""
    parts = "\n".join([STYLE, body(show), *plots])
    return clean(f'<div class="razorctl">{parts}</div>')


def body(show: Callable[[], object]) -> str:
    """The output of a view as HTML, without its style."""
    console = record(show)
    return "\n".join(
        _table(console, each) if isinstance(each, Table) else _line(console, each, style)
        for each, style in console.printed
    )


def whole(title: str, parts: Sequence[str]) -> str:
    """A whole page, which loads no other files; parts: the HTML below its title."""
    heading = f"<h1>{escape(title)}</h1>"
    above = [HEAD, f"<title>{escape(title)}</title>", STYLE, '<body class="razorctl">', heading]
    return "\n".join([*above, *parts, "</body>", "</html>", ""])


def _line(console: CleanConsole, line: Any, style: Any) -> str:
    return f"<p>{_text(console, Text(str(line)) if style is None else line, style)}</p>"


def _table(console: CleanConsole, table: Table) -> str:
    """A table of rich as HTML."""
    title = f"<caption>{_text(console, table.title)}</caption>" if table.title else ""
    heads, rows = [], []
    for column in table.columns:
        side = ' class="right"' if column.justify == "right" else ""
        heads.append(f"<th{side}>{_text(console, column.header)}</th>")
    for row, cells in zip(
        table.rows, zip(*(column.cells for column in table.columns), strict=True), strict=True
    ):
        shown = []
        for column, cell in zip(table.columns, cells, strict=True):
            names = ["right"] if column.justify == "right" else []
            if row.end_section:
                names.append("end")
            style = console.get_style(column.style or "") + console.get_style(row.style or "")
            shown.append(f'<td class="{" ".join(names)}">{_text(console, cell, style)}</td>')
        rows.append(f"<tr>{''.join(shown)}</tr>")
    head = f"<thead><tr>{''.join(heads)}</tr></thead>" if table.show_header else ""
    body = f"<table>{title}{head}<tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="wide">{body}</div>'


def _text(console: CleanConsole, text: Any, style: Any = None) -> str:
    """A text with rich markup, in styles that suit any theme."""
    if not isinstance(text, Text):
        text = console.render_str(str(text), highlight=False)
    if style is not None:
        text = text.copy()
        text.stylize_before(style)
    return "".join(_span(segment) for segment in text.render(console))


def _span(segment: Segment) -> str:
    style, rules = segment.style, []
    if style is not None:
        if style.bold:
            rules.append("font-weight:600")
        if style.dim:
            rules.append("opacity:.7")
        if style.color and style.color.name in COLORS:
            rules.append(f"color:{COLORS[style.color.name]}")
    body = escape(segment.text).replace("\n", "<br>")
    return f'<span style="{";".join(rules)}">{body}</span>' if rules else body
