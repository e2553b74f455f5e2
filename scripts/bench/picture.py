"""Draws the peak memory of every method against its step time, at every ratio, for README.md.

    .venv/bin/python scripts/bench/picture.py [--check]

The script reads results/frontier_cpu.json and writes scripts/assets/memory-time-{light,dark}.svg.
Each picture has its points as text too. `--check` draws nothing, and exits with 1 if a picture was
drawn from other results.
"""

import argparse
import sys
from itertools import pairwise, product
from typing import Any

from pages import MIB, ROOT, load

PICTURES = {mode: ROOT / f"scripts/assets/memory-time-{mode}.svg" for mode in ("light", "dark")}
INK = {"light": "#1f2328", "dark": "#e6edf3"}
GRID = {"light": "#d1d9e0", "dark": "#3d444d"}
COLORS = {  # colors of a group in both modes
    "exact": {"light": "#59636e", "dark": "#9198a1"},
    "pruning, of the papers": {"light": "#0969da", "dark": "#58a6ff"},
    "few bits": {"light": "#8250df", "dark": "#bc8cff"},
    "razor": {"light": "#cf222e", "dark": "#ff7b72"},
}
Point = tuple[float, float]  # step time against full, peak in MiB
# Places of a label beside its point, nearest first: offset in points, horizontal alignment.
PLACES = [
    (x * distance, y * distance - 3, {-1: "right", 0: "center", 1: "left"}[x])
    for distance in (8, 14, 22, 32)
    for x, y in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
]
NEAR = 8  # of these are next to the point
SIZE, FINE = 9, 7.5  # of a name, and of a ratio or micro-batch, in points


def points() -> list[tuple[str, float, float]]:
    """The case, peak in MiB and step time against full of each point."""
    return [
        (row["case"], round(row["peak_bytes"] / MIB, 1), round(row["step_time_vs_full"], 3))
        for row in load("frontier_cpu")["rows"]
        if not row["error"]
    ]


def words() -> str:
    return "; ".join(f"{case}: {peak} MiB, {time}" for case, peak, time in points())


def group(line: str) -> str:
    if line.startswith("razor"):
        return "razor"
    if "backrazor" in line:
        return "pruning, of the papers"
    if line.startswith("ratio "):
        return "pruning, of the papers"
    return "few bits" if line in ("half", "int8", "int2") else "exact"


def lines() -> dict[str, list[Point]]:
    """The points of each line: of a method by ratio, of full by micro-batch; others stand alone."""
    found: dict[str, list[Point]] = {}
    for case, peak, time in points():
        line = "full" if case.startswith("accumulate ") else case.partition(" at ")[0]
        found.setdefault(line, []).append((time, peak))
    return found


def labels() -> list[tuple[str, list[Point], str, float]]:
    """The text of each label, the points that it may stand at, best first, its group and its size;
    those with the least choice are first.
    """
    names = [
        (line, drawn[:1] if line == "full" else drawn[::-1], group(line), SIZE)
        for line, drawn in lines().items()
    ]
    single = []
    for case, peak, time in points():
        if case.startswith("backrazor at "):  # whose points are furthest apart
            single.append((case.replace("backrazor at", "ratio"), peak, time))
        if case.startswith("accumulate "):
            single.append((case.replace("accumulate", "micro-batches of"), peak, time))
    names.sort(key=lambda label: len(label[1]))
    alone = sum(len(label[1]) == 1 for label in names)
    fine = [(text, [(time, peak)], group(text), FINE) for text, peak, time in single]
    return [*names[:alone], *fine, *names[alone:]]


def place(axes: Any, text: str, ends: list[Point], taken: list[Any], **font: Any) -> None:
    """Writes a label where it covers least of what is taken, to which it adds its own box; a line
    leads to it from its point if that is not next to it. Fine print is left out then.
    """

    def written(end: Point, place: tuple[float, float, str], **more: Any) -> Any:
        x, y, side = place
        return axes.annotate(text, end, (x, y), textcoords="offset points", ha=side, **font, **more)

    tried = []
    for nth, (where, end) in enumerate(product(PLACES, ends)):
        label = written(end, where)
        box = label.get_window_extent().padded(3)
        label.remove()
        covered = sum(_shared(box, other) for other in taken)
        covered += box.width * box.height - _shared(box, axes.bbox)
        tried.append((round(covered), nth, end, where, box))
    covered, nth, end, where, box = min(tried, key=lambda found: found[:2])
    far = nth // len(ends) >= NEAR
    if far and font["size"] == FINE:
        return
    leader = {"arrowstyle": "-", "color": font["color"], "linewidth": 0.6, "shrinkB": 3}
    written(end, where, arrowprops=leader if far else None)
    taken.append(box)


def _shared(a: Any, b: Any) -> float:
    """The area that two boxes share."""
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    return float(max(0, width) * max(0, height))


def boxes(axes: Any) -> list[Any]:
    """Boxes, in pixels, around what is drawn of each line."""
    from matplotlib.transforms import Bbox

    found = []
    for drawn in lines().values():
        ends = [axes.transData.transform(point) for point in drawn]
        found += [Bbox([(x - 5, y - 5), (x + 5, y + 5)]) for x, y in ends]
        for (x0, y0), (x1, y1) in pairwise(ends):
            shares = (n / 40 for n in range(41))
            middles = ((x0 + s * (x1 - x0), y0 + s * (y1 - y0)) for s in shares)
            found += [Bbox([(x - 2, y - 2), (x + 2, y + 2)]) for x, y in middles]
    return found


def draw(mode: str) -> None:
    import matplotlib as mpl  # slow, and not for --check

    mpl.use("agg")  # it can say where a label is; the picture is written as SVG
    mpl.rcParams.update({"svg.hashsalt": "razorctl", "font.size": 10})
    from matplotlib import pyplot as plt

    ink = INK[mode]
    figure, axes = plt.subplots(figsize=(8, 5.2), layout="constrained")
    named = set()
    for line, drawn in lines().items():
        name = group(line)
        size, width = (7.5, 2) if name == "razor" else (5, 1.2)
        axes.plot(
            *zip(*drawn, strict=True),
            marker="o",
            markersize=size,
            linewidth=width,
            color=COLORS[name][mode],
            label=None if name in named else name,
            zorder=3,
        )
        named.add(name)
    axes.margins(x=0.16, y=0.12)
    axes.set_xlabel("time of a step, in steps of full (left is better)", color=ink)
    axes.set_ylabel("peak of a step, MiB (down is better)", color=ink)
    axes.tick_params(colors=ink)
    axes.grid(color=GRID[mode], linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID[mode])
    legend = axes.legend(labelcolor=ink, frameon=False, loc="upper right")
    figure.canvas.draw()
    figure.set_layout_engine("none")  # labels are placed in what was laid out
    taken = [*boxes(axes), legend.get_window_extent()]
    for text, ends, name, size in labels():
        font = {"color": COLORS[name][mode], "weight": "bold" if name == "razor" else "normal"}
        place(axes, text, ends, taken, size=size, **font)
    about = {"Date": None, "Title": "Peak memory against step time", "Description": words()}
    figure.savefig(PICTURES[mode], transparent=True, metadata=about)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="draw nothing, compare")
    if not parser.parse_args().check:
        for mode in PICTURES:
            draw(mode)
        return 0
    old = [p for p in PICTURES.values() if not p.exists() or words() not in p.read_text()]
    for path in old:
        print(f"{path.relative_to(ROOT)} is of other results; run scripts/bench/picture.py.")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
