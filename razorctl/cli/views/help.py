"""Help pages: an example, the most used options, and the others in panels.

typer's own page has five columns for an option, which cuts flags and choices at a width of 80.
"""

from collections.abc import Iterator
from inspect import cleandoc
from textwrap import fill
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import render
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from razorctl.cli.views import common as views

WIDEST = 120  # most characters of a line
LEFT = 32  # most characters of flags; longer flags are on a separate line
FIRST = "Options"
DEFAULT, BY_MODEL = "[default: ", "[default: by model]"
OF_MODEL = "by model: see `razorctl list defaults MODEL DATASET`"
FLAG, VALUE = "bold cyan", "yellow"

Row = tuple[Text, str]  # an argument or the flags of an option, and its help


def show(command: Any, ctx: Any) -> None:
    """Prints the help of a command or of the application."""
    width = min(views.out.width, WIDEST)
    for part in _page(command, ctx, width):
        unbroken = isinstance(part, Text)  # such as an example, which users copy
        views.out.print(part, highlight=False, width=width, soft_wrap=unbroken)


def _page(command: Any, ctx: Any, width: int) -> Iterator[RenderableType]:
    summary, *paragraphs = cleandoc(command.help).split("\n\n")
    examples = [text for text in paragraphs if text.startswith("    ")]
    yield Text(f"\n{_wrapped(command.get_usage(ctx), width)}", "bold")
    yield Text(f"\n{_wrapped(summary, width)}\n")
    yield from (Text(f"{text}\n", FLAG) for text in examples)
    yield from (_panel(name, rows, width) for name, rows in _panels(command, ctx).items())
    for text in paragraphs:
        if text not in examples:
            yield Text(f"\n{_wrapped(text, width)}")


def _wrapped(paragraph: str, width: int) -> str:
    return fill(" ".join(paragraph.split()), width, break_on_hyphens=False)


def _panels(command: Any, ctx: Any) -> dict[str, list[Row]]:
    """Panel -> its rows, in the order of the page."""
    panels: dict[str, list[Row]] = {"Arguments": [], FIRST: []}
    for each in command.get_params(ctx):
        if each.param_type_name == "argument":
            panels["Arguments"].append((Text(each.display_name_raw, VALUE), _about(each, ctx)))
        elif not each.hidden:
            name = each.rich_help_panel or FIRST
            panels.setdefault(name, []).append((_flags(each), _about(each, ctx)))
    for name, other in getattr(command, "commands", {}).items():
        panels.setdefault("Commands", []).append((Text(name, FLAG), other.help))
    return {name: rows for name, rows in panels.items() if rows}


def _flags(option: Any) -> Text:
    """The flags of an option and its metavar, as in --steps N or --[no-]lora."""
    flags = sorted(option.opts, key=len)
    if option.secondary_opts:
        flags = [flag.replace("--", "--[no-]") for flag in flags]
    value = f" {option.metavar}" if option.metavar else ""
    return Text.assemble((", ".join(flags), FLAG), (value, VALUE))


def _about(parameter: Any, ctx: Any) -> str:
    """The help of a parameter with its default, or with the value of the file of settings."""
    about = render(parameter.help or "", emoji=False).plain
    value = ctx.lookup_default(parameter.name, call=False)
    if value is not None:
        return f"{about.partition(f' {DEFAULT}')[0]} {DEFAULT}{value}, by the file of settings]"
    default = parameter.default
    if DEFAULT in about or default is None or isinstance(default, bool):
        return about
    return f"{about} {DEFAULT}{default}]"


def _panel(name: str, rows: list[Row], width: int) -> Panel:
    """A box with two columns, flags and help; long flags are above their help."""
    most = min(LEFT, (width - 4) // 2)
    left = max((size for flags, _ in rows if (size := flags.cell_len) <= most), default=0)
    parts: list[RenderableType] = []
    for flags, about in rows:
        above = flags.cell_len > left
        parts += [flags] if above else []
        line = Table.grid(expand=True, padding=(0, 2, 0, 0))
        line.add_column(width=left)
        line.add_column(ratio=1, overflow="fold")
        text, default, value = about.partition(DEFAULT)
        line.add_row("" if above else flags, Text.assemble(text, (default + value, "dim")))
        parts.append(line)
    if any(about.endswith(BY_MODEL) for _, about in rows):
        parts.append(Text(OF_MODEL, "dim"))
    return Panel(Group(*parts), title=name, title_align="left", border_style="dim")
