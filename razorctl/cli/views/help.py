"""Pages of help: an example, the options that people use first, and the others in panels.

Its lines are drawn here: panels of rich would take as long as half of the command.
"""

from collections.abc import Iterator
from inspect import cleandoc
from typing import Any

from rich.box import ROUNDED
from rich.cells import cell_len, chop_cells
from rich.markup import render
from rich.segment import Segment, Segments

from razorctl.cli.views import common as views

WIDEST = 120  # columns that a page takes at most
LEFT = 32  # columns of flags at most; longer ones have a line of their own
FIRST = "Options"
DEFAULT, BY_MODEL = "[default: ", "[default: by model]"
OF_MODEL = "by model: `razorctl list defaults MODEL DATASET` shows them"
FLAG = "bold cyan"

Line = list[tuple[str, str]]  # texts, each with its style
END = ("\n", "")
Row = tuple[Line, str]  # the words of what is typed, and what it means


def show(command: Any, ctx: Any) -> None:
    """The help of a command, or of the application."""
    page = _page(command, ctx, min(views.out.width, WIDEST))
    styled = views.out.get_style
    segments = (Segment(text, styled(style)) for line in page for text, style in [*line, END])
    views.out.print(Segments(segments), soft_wrap=True)


def _page(command: Any, ctx: Any, width: int) -> Iterator[Line]:
    summary, *paragraphs = cleandoc(command.help).split("\n\n")
    examples = [text for text in paragraphs if text.startswith("    ")]
    yield from _paragraph(command.get_usage(ctx), "bold", width)
    yield from _paragraph(summary, "", width)
    for text in examples:
        yield []
        yield from ([(line, FLAG)] for line in text.splitlines())
    yield []
    for name, rows in _panels(command, ctx).items():
        yield from _panel(name, rows, width)
    for text in paragraphs:
        if text not in examples:
            yield from _paragraph(text, "", width)


def _paragraph(text: str, style: str, width: int) -> Iterator[Line]:
    """A paragraph below an empty line."""
    yield []
    yield from ([(" ", ""), *line] for line in _wrapped(_words(text, style), width - 2))


def _words(text: str, style: str) -> Line:
    return [(word, style) for word in text.split()]


def _wrapped(words: Line, width: int) -> list[Line]:
    """Lines of words, with a space between two; one that is wider than a line is broken."""
    lines: list[Line] = []
    free = 0
    for word, style in words:
        for part in [word] if cell_len(word) <= width else chop_cells(word, width):
            if cell_len(part) >= free:
                lines.append([(part, style)])
                free = width + 1
            elif lines[-1][-1][1] == style:
                lines[-1][-1] = (f"{lines[-1][-1][0]} {part}", style)
            else:
                lines[-1].append((f" {part}", style))
            free -= cell_len(part) + 1
    return lines


def _panels(command: Any, ctx: Any) -> dict[str, list[Row]]:
    """The rows of each panel, by its name and in order."""
    panels: dict[str, list[Row]] = {"Arguments": [], FIRST: []}
    for each in command.get_params(ctx):
        if each.param_type_name == "argument":
            typed = [(each.display_name_raw, "yellow")]
            panels["Arguments"].append((typed, _about(each, ctx)))
        else:
            name = each.rich_help_panel or FIRST
            panels.setdefault(name, []).append((_typed(each), _about(each, ctx)))
    for name, other in getattr(command, "commands", {}).items():
        panels.setdefault("Commands", []).append(([(name, FLAG)], other.help))
    return {name: rows for name, rows in panels.items() if rows}


def _typed(option: Any) -> Line:
    """The flags of an option and what they take, as in --steps N or --[no-]lora."""
    flags = sorted(option.opts, key=len)
    if option.secondary_opts:
        flags = [flag.replace("--", "--[no-]") for flag in flags]
    return _words(", ".join(flags), FLAG) + _words(option.metavar or "", "yellow")


def _about(parameter: Any, ctx: Any) -> str:
    """The help of a parameter, with its default: that of a file of settings, if there is one."""
    about = render(parameter.help or "", emoji=False).plain
    found = ctx.lookup_default(parameter.name, call=False)
    if found is not None:
        return f"{about.partition(f' {DEFAULT}')[0]} {DEFAULT}{found}, by the file of settings]"
    default = parameter.default
    if DEFAULT in about or default is None or isinstance(default, bool):
        return about
    return f"{about} {DEFAULT}{default}]"


def _panel(name: str, rows: list[Row], width: int) -> Iterator[Line]:
    """A box whose rows stand in two columns, however long a flag is."""
    box = ROUNDED.substitute(views.out.options)
    top, inner = f"{box.top_left}{box.top} {name} ", width - 4
    most = min(LEFT, inner // 2)
    sizes = [_size(line) for typed, _ in rows for line in _wrapped(typed, inner)]
    left = 2 + max((size for size in sizes if size <= most), default=2)
    lines = [line for row in rows for line in _lines(*row, left, inner)]
    if any(about.endswith(BY_MODEL) for _, about in rows):
        lines += _wrapped(_words(OF_MODEL, "dim"), inner)
    yield [(f"{top:{box.top}<{width - 1}}{box.top_right}", "dim")]
    for line in lines:
        rest = " " * (inner - _size(line))
        yield [(f"{box.mid_left} ", "dim"), *line, (f"{rest} {box.mid_right}", "dim")]
    yield [(f"{box.bottom_left}{box.bottom * (width - 2)}{box.bottom_right}", "dim")]


def _size(line: Line) -> int:
    """The columns that a line takes."""
    return sum(cell_len(text) for text, _ in line)


def _lines(words: Line, about: str, left: int, inner: int) -> Iterator[Line]:
    """The lines of a row: what is typed, and beside it or below it what it means."""
    meaning, default, rest = about.partition(DEFAULT)
    lines = _wrapped(_words(meaning, "") + _words(default + rest, "dim"), inner - left)
    *before, typed = _wrapped(words, inner)
    yield from before
    if _size(typed) + 2 > left or not lines:
        yield typed
    else:
        yield [*typed, (" " * (left - _size(typed)), ""), *lines.pop(0)]
    yield from ([(" " * left, ""), *line] for line in lines)
