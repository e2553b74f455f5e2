"""The plots of a report, as SVG inside an HTML page whose CSS variables color them.

Plots are drawn in placeholder colors for these variables, so that one plot suits light and dark.
"""

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import hypot
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from razorctl.training.comparing.curves import Curve, mean_curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID, PAPER = "#010101", "#020202", "#030303"
LINES = tuple(f"#0400{n:02x}" for n in range(8))
VARIABLES = {INK: "--ink", GRID: "--grid", PAPER: "--paper"} | {
    color: f"--line-{n}" for n, color in enumerate(LINES)
}
OF_METHOD = {"full": 0, "razor": 1}  # methods whose lines are always the same
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)))
WIDE, NARROW = (4.8, 3.6), (4.4, 2.9)  # inches, of 72 px on the page
MARKED = 12  # most points of a curve with markers
SIZE = 10  # of text, in points
# Places of a label beside its point, nearest first: offset in points, horizontal alignment.
PLACES = [
    (x * distance, y * distance - 3, {-1: "right", 0: "center", 1: "left"}[x])
    for distance in (8, 15, 24, 34)
    for x, y in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
]
NEAR = 8  # the first NEAR places are next to the point
NAMED = 12  # most points that all have a label


@dataclass(frozen=True)
class LineStyle:
    """The line of a row: the indices of a color of LINES and of one of DASHES."""

    color: int
    dash: int


@dataclass(frozen=True)
class Point:
    """A row in the plot of memory against time; front: whether it is on the Pareto front."""

    label: str
    line: LineStyle
    time: float
    memory: float
    front: bool


def line_styles(methods: Iterable[str]) -> list[LineStyle]:
    """A line for each row of a comparison; `full` and `razor` always have the same first line."""
    used: list[LineStyle] = []
    others = [n for n in range(len(LINES)) if n not in OF_METHOD.values()]
    order = [LineStyle(n, dash) for dash in range(len(DASHES)) for n in others]
    for method in methods:
        choices = order
        if method in OF_METHOD:
            choices = [LineStyle(OF_METHOD[method], dash) for dash in range(len(DASHES))] + order
        used.append(next((line for line in choices if line not in used), order[-1]))
    return used


def memory_time(points: Sequence[Point], time: str, memory: str) -> str:
    """Memory against step time; `time` and `memory` are the names of the axes.

    With more points than NAMED, only the Pareto front and the first lines of OF_METHOD have labels.
    """
    figure, axes = _axes(WIDE, time, memory)
    for point in points:
        color = LINES[point.line.color]
        face = color if point.front else PAPER
        axes.plot(point.time, point.memory, "o", ms=7, mec=color, mfc=face, mew=1.6, zorder=3)
    axes.margins(x=0.2, y=0.16)
    axes.set_ylim(bottom=0)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # labels are placed in the finished layout
    _label(axes, points)
    return _svg(figure, f"{memory} by {time}")


def curves(groups: Sequence[tuple[LineStyle, Sequence[Curve]]], over: str, name: str) -> str:
    """The mean curve of each row, and thin curves of its seeds; over: `steps` or `seconds`."""
    figure, axes = _axes(NARROW, over, name)
    for line, seeds in groups:
        style: dict[str, Any] = {"color": LINES[line.color], "ls": DASHES[line.dash]}
        for curve in seeds if len(seeds) > 1 else ():
            axes.plot(getattr(curve, over), curve.values, lw=0.6, alpha=0.45, **style)
        middle = mean_curve(seeds)
        marker = "o" if len(middle.values) <= MARKED else ""
        width = 3.2 if line.color == OF_METHOD["full"] else 1.5  # other exact methods may cover it
        axes.plot(getattr(middle, over), middle.values, lw=width, marker=marker, ms=3.2, **style)
    axes.set_xlim(left=0)
    return _svg(figure, f"{name} over {over}")


def _axes(size: tuple[float, float], across: str, up: str) -> "tuple[Figure, Axes]":
    """An empty plot with named axes."""
    # Imported here: it is slow, and few commands plot.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)  # computes the extents of labels
    axes = figure.add_subplot()
    axes.set_xlabel(across, color=INK, size=SIZE)
    axes.set_ylabel(up, color=INK, size=SIZE)
    axes.tick_params(colors=INK, labelsize=SIZE)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    return figure, axes


def _label(axes: "Axes", points: Sequence[Point]) -> None:
    """Writes the labels of points, first of those with the nearest neighbors."""
    always = [LineStyle(color, 0) for color in OF_METHOD.values()]
    few = len(points) <= NAMED
    ends = [axes.transData.transform((point.time, point.memory)) for point in points]
    room = [
        min((hypot(*(end - other)) for other in ends if other is not end), default=0.0)
        for end in ends
    ]
    labels: list[Any] = []
    for _, point in sorted(zip(room, points, strict=True), key=itemgetter(0)):
        if not (few or point.front or point.line in always):
            continue
        others = [_around(axes, other, 9) for other in points if other is not point]
        labels.append(_place(axes, point, [_around(axes, point, 6), *others, *labels]))


def _around(axes: "Axes", point: Point, size: float) -> Any:
    """The box with `size` pixels on each side of a point."""
    from matplotlib.transforms import Bbox

    x, y = axes.transData.transform((point.time, point.memory))
    return Bbox.from_extents(x - size, y - size, x + size, y + size)


def _place(axes: "Axes", point: Point, taken: Sequence[Any]) -> Any:
    """Writes a label where it covers least of the boxes `taken`, and returns its box.

    A line connects it with its point unless they are neighbors.
    """
    color = LINES[point.line.color]

    def write(place: tuple[float, float, str], **more: Any) -> Any:
        x, y, side = place
        more |= {"color": color, "size": SIZE, "ha": side, "parse_math": False}  # a $ is no TeX
        at = (point.time, point.memory)
        return axes.annotate(point.label, at, (x, y), textcoords="offset points", **more)

    tried = []
    for nth, place in enumerate(PLACES):
        label = write(place)
        box = label.get_window_extent().padded(3)
        label.remove()
        covered = sum(_shared(box, other) for other in taken)
        covered += box.width * box.height - _shared(box, axes.bbox)
        tried.append((round(covered), nth, box))
    _, nth, box = min(tried, key=itemgetter(0, 1))
    leader = {"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkB": 4}
    write(PLACES[nth], arrowprops=leader if nth >= NEAR else None)
    return box


def _shared(a: Any, b: Any) -> float:
    """The area that two boxes share."""
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    return float(max(0, width) * max(0, height))


def _svg(figure: "Figure", name: str) -> str:
    """The <svg> element of a figure, the same for the same plot; name: unique on the page."""
    import matplotlib as mpl

    text = io.StringIO()
    about = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with mpl.rc_context({"svg.hashsalt": f"razorctl {name}", "svg.fonttype": "none"}):
        figure.savefig(text, format="svg", transparent=True, metadata=about)
    svg = text.getvalue()
    svg = re.sub(r"<!--.*?-->\n?", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # no element refers to it
    svg = re.sub(r' (?:xmlns(?::xlink)?|version|width|height)="[^"]*"', "", svg, count=5)
    svg = re.sub(r"font: ((?:bold )?)([\d.]+px) [^;\"]*", r"font-size: \2", svg)  # of the page
    svg = svg.replace("xlink:href=", "href=")
    svg = svg.replace("<svg", f'<svg role="img" aria-label="{escape(name)}"', 1)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, f"var({variable})")
    return svg
