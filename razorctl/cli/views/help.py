"""What `--help` prints: an example, the options that people use first, and the others in panels."""

from collections.abc import Iterable, Iterator
from inspect import cleandoc
from typing import Any

from rich.panel import Panel
from rich.text import Text

from razorctl.cli.views import common as views

WIDEST = 120  # columns that a page takes at most
LEFT = 32  # columns of flags at most; longer ones have a line of their own
FIRST = "Options"
DEFAULT, BY_MODEL = "[default: ", "[default: by model]"
OF_MODEL = "by model: `razorctl list defaults MODEL DATASET` shows them"


def show(command: Any, ctx: Any) -> None:
    """The help of a command, or of the application."""
    width = min(views.out.width, WIDEST)
    summary, *paragraphs = cleandoc(command.help).split("\n\n")
    examples = [text for text in paragraphs if text.startswith("    ")]
    _say(command.get_usage(ctx), "bold", width)
    _say(summary, "", width)
    for text in examples:
        views.out.print("", Text(text, "bold cyan"), sep="\n", soft_wrap=True)
    views.out.print()
    for name, rows in _panels(command, ctx).items():
        views.out.print(_panel(name, rows, width))
    for text in paragraphs:
        if text not in examples:
            _say(text, "", width)


def _say(paragraph: str, style: str, width: int) -> None:
    """A paragraph below an empty line."""
    text = Text(" ".join(paragraph.split()), style)
    views.out.print()
    for line in _wrapped(text, width - 2):
        views.out.print(Text(" ") + line, soft_wrap=True)


def _wrapped(text: Text, width: int) -> list[Text]:
    lines = list(text.wrap(views.out, width))
    for line in lines:
        line.rstrip()
    return lines


Row = tuple[Text, str]  # what is typed, and what it means


def _panels(command: Any, ctx: Any) -> dict[str, list[Row]]:
    """The rows of each panel, by its name and in order."""
    panels: dict[str, list[Row]] = {"Arguments": [], FIRST: []}
    for each in command.get_params(ctx):
        if each.param_type_name == "argument":
            panels["Arguments"].append((Text(each.display_name_raw, "yellow"), _about(each, ctx)))
        else:
            name = each.rich_help_panel or FIRST
            panels.setdefault(name, []).append((_typed(each), _about(each, ctx)))
    for name, other in getattr(command, "commands", {}).items():
        panels.setdefault("Commands", []).append((Text(name, "bold cyan"), other.help))
    return {name: rows for name, rows in panels.items() if rows}


def _typed(option: Any) -> Text:
    """The flags of an option and what they take, as in --steps N or --[no-]lora."""
    flags = sorted(option.opts, key=len)
    if option.secondary_opts:
        flags = [flag.replace("--", "--[no-]") for flag in flags]
    text = Text(", ".join(flags), "bold cyan")
    return text.append(f" {option.metavar}", "not bold yellow") if option.metavar else text


def _about(parameter: Any, ctx: Any) -> str:
    """The help of a parameter, with its default: that of a file of settings, if there is one."""
    about = Text.from_markup(parameter.help or "", emoji=False).plain
    found = ctx.lookup_default(parameter.name, call=False)
    if found is not None:
        return f"{about.partition(f' {DEFAULT}')[0]} {DEFAULT}{found}, by the file of settings]"
    default = parameter.default
    if DEFAULT in about or default is None or isinstance(default, bool):
        return about
    return f"{about} {DEFAULT}{default}]"


def _panel(name: str, rows: Iterable[Row], width: int) -> Panel:
    """A panel whose rows stand in two columns, however long a flag is."""
    found = list(rows)
    inner = width - 4
    most = min(LEFT, inner // 2)
    left = 2 + max((typed.cell_len for typed, _ in found if typed.cell_len <= most), default=2)
    body = Text("\n").join(line for row in found for line in _lines(*row, left, inner - left))
    if any(about.endswith(BY_MODEL) for _, about in found):
        body.append(f"\n{OF_MODEL}", "dim")
    return Panel(body, title=name, title_align="left", border_style="dim", width=width)


def _lines(typed: Text, about: str, left: int, right: int) -> Iterator[Text]:
    """The lines of a row: what is typed, and beside it or below it what it means."""
    meaning, default, rest = about.partition(DEFAULT)
    text = Text(meaning)
    text.append(default + rest, "dim")
    lines = _wrapped(text, right)
    if typed.cell_len + 2 > left:
        yield typed
    elif lines:
        yield typed + Text(" " * (left - typed.cell_len)) + lines.pop(0)
    else:
        yield typed
    for line in lines:
        yield Text(" " * left) + line
