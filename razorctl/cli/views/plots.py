"""The plots of a report, as <img> elements that contain their SVG."""

import io
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from razorctl.training.comparing.curves import Curve, mean_curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKED = 12  # most points of a curve with markers
WIDTH, HEIGHT = 4.4, 3.0  # of a panel, in inches
LOW, PIXELS = 1.9, 1200  # height of a panel and width of a PNG, whose text is legible at 360 pixels
Row = tuple[str, Sequence[Curve]]  # the label of a row, and the curves of its seeds


class Point(NamedTuple):
    """A row in the plot of memory over time; front: whether it is on the Pareto front."""

    label: str
    time: float
    memory: float
    front: bool


class Panel(NamedTuple):
    """The curves of the figure `name` over `steps` or `seconds`."""

    name: str
    over: str
    rows: Sequence[Row]


def memory_time(points: Sequence[Point], time: str, memory: str) -> str:
    """Plots memory over step time; `time` and `memory` are the names of the axes."""
    with _style():
        figure = _figure(1.1 * WIDTH, 1.2 * HEIGHT)
        axes = figure.add_subplot(xlabel=time, ylabel=memory)
        for point in points:
            fill = "full" if point.front else "none"
            axes.plot(point.time, point.memory, ls="", ms=8, fillstyle=fill, label=point.label)
        axes.margins(0.1)
        axes.set_ylim(bottom=0)
        figure.legend(loc="upper left", bbox_to_anchor=(1, 1))
        return _image(figure, f"{memory} by {time}")


def curves(panels: Sequence[Panel]) -> str:
    """Plots panels, two side by side, with a thick mean curve and thin curves of the seeds."""
    with _style():
        figure = _curves(panels, 2, HEIGHT)
        return _image(figure, ", ".join(f"{name} over {over}" for name, over, _ in panels))


def write_curves(panels: Sequence[Panel], file: Path) -> None:
    """Writes a PNG of PIXELS with panels, one below the other, as `curves` plots them."""
    with _style():
        figure = _curves(panels, 1, LOW)
        figure.savefig(file, format="png", dpi=PIXELS / WIDTH, facecolor="white")


def _curves(panels: Sequence[Panel], columns: int, height: float) -> "Figure":
    high = -(-len(panels) // columns)
    figure = _figure(columns * WIDTH, high * height)
    for number, (name, over, rows) in enumerate(panels, 1):
        axes = figure.add_subplot(high, columns, number, xlabel=over, ylabel=name)
        for nth, (label, seeds) in enumerate(rows):
            mean = mean_curve(seeds)
            wide = 1.5 if nth else 3.2  # a later curve may cover the first one exactly
            (line,) = axes.plot(getattr(mean, over), mean.values, lw=wide, ms=4, label=label)
            style: dict[str, Any] = {"color": line.get_color(), "ls": line.get_linestyle()}
            if len(mean.values) > MARKED:
                line.set_marker("")
            for curve in seeds if len(seeds) > 1 else ():
                x = getattr(curve, over)
                axes.plot(x, curve.values, lw=0.6, alpha=0.45, marker="", **style)
        axes.set_xlim(left=0)
    if len(panels[0].rows) > 1:
        lines, labels = axes.get_legend_handles_labels()
        figure.legend(lines, labels, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=4)
    return figure


def _style() -> Any:
    """The context in which plots are drawn; rows differ in color, more rows also in dashes."""
    import matplotlib as mpl  # here: it is slow, and few commands plot
    from cycler import cycler

    dashes = cycler(ls=["-", "--", ":", "-."]) + cycler(marker=["o", "s", "^", "D"])
    return mpl.rc_context(
        {
            "axes.prop_cycle": dashes * mpl.rcParamsDefault["axes.prop_cycle"],
            "axes.grid": True,
            "grid.alpha": 0.4,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "svg.fonttype": "none",
            "svg.hashsalt": "razorctl",  # the same plot is the same text
            "text.parse_math": False,  # a $ is no TeX
        }
    )


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _image(figure: "Figure", words: str) -> str:
    """The <img> element of a figure; words: its text for readers who do not see it."""
    svg = io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None}, bbox_inches="tight")  # with legend
    data = b64encode(svg.getvalue()).decode()
    return f'<img alt="{escape(words)}" src="data:image/svg+xml;base64,{data}">'
