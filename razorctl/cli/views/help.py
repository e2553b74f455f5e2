"""Help pages: an example, the most used options, and the others in panels.

The panels are drawn here: rich would take half of the time of `--help` for them.
"""

from collections.abc import Iterator
from inspect import cleandoc
from typing import Any

from rich.box import ROUNDED
from rich.cells import cell_len, chop_cells
from rich.markup import render
from rich.segment import Segment, Segments

from razorctl.cli.views import common as views

WIDEST = 120  # most columns of a page
LEFT = 32  # most columns for flags; longer flags have a line of their own
FIRST = "Options"
DEFAULT, BY_MODEL = "[default: ", "[default: by model]"
OF_MODEL = "by model: see `razorctl list defaults MODEL DATASET`"
FLAG = "bold cyan"

Line = list[tuple[str, str]]  # texts, each with its style
END = ("\n", "")
Row = tuple[Line, str]  # an argument or the flags of an option, and its help


def show(command: Any, ctx: Any) -> None:
    """Prints the help of a command or of the application."""
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
    """Lines of words; a word that is wider than a line is broken."""
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
            argument = [(each.display_name_raw, "yellow")]
            panels["Arguments"].append((argument, _about(each, ctx)))
        elif not each.hidden:
            name = each.rich_help_panel or FIRST
            panels.setdefault(name, []).append((_flags(each), _about(each, ctx)))
    for name, other in getattr(command, "commands", {}).items():
        panels.setdefault("Commands", []).append(([(name, FLAG)], other.help))
    return {name: rows for name, rows in panels.items() if rows}


def _flags(option: Any) -> Line:
    """The flags of an option and its metavar, as in --steps N or --[no-]lora."""
    flags = sorted(option.opts, key=len)
    if option.secondary_opts:
        flags = [flag.replace("--", "--[no-]") for flag in flags]
    return _words(", ".join(flags), FLAG) + _words(option.metavar or "", "yellow")


def _about(parameter: Any, ctx: Any) -> str:
    """The help of a parameter with its default, which a file of settings may set."""
    about = render(parameter.help or "", emoji=False).plain
    value = ctx.lookup_default(parameter.name, call=False)
    if value is not None:
        return f"{about.partition(f' {DEFAULT}')[0]} {DEFAULT}{value}, by the file of settings]"
    default = parameter.default
    if DEFAULT in about or default is None or isinstance(default, bool):
        return about
    return f"{about} {DEFAULT}{default}]"


def _panel(name: str, rows: list[Row], width: int) -> Iterator[Line]:
    """A box with rows in two columns."""
    box = ROUNDED.substitute(views.out.options)
    top, inner = f"{box.top_left}{box.top} {name} ", width - 4
    most = min(LEFT, inner // 2)
    sizes = [_size(line) for flags, _ in rows for line in _wrapped(flags, inner)]
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
    """The lines of a row: the flags, and the help beside or below them."""
    meaning, default, rest = about.partition(DEFAULT)
    lines = _wrapped(_words(meaning, "") + _words(default + rest, "dim"), inner - left)
    *above, flags = _wrapped(words, inner)
    yield from above
    if _size(flags) + 2 > left or not lines:
        yield flags
    else:
        yield [*flags, (" " * (left - _size(flags)), ""), *lines.pop(0)]
    yield from ([(" " * left, ""), *line] for line in lines)
