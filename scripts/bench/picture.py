"""Draws the pictures of README.md and of gradients.md.

    .venv/bin/python scripts/bench/picture.py [--check]

The script writes scripts/assets/memory-time-{light,dark}.svg, the peak memory of a step against its
time, by method, from results/frontier_cpu.json, and scripts/assets/bytes-error-{light,dark}.svg,
the stored bytes of `razor` against the error of its gradient, by what is recomputed, from
results/allocate.json. Each picture has its points as text too. `--check` draws nothing, and exits
with 1 if a picture was drawn from other results.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pages import MIB, ROOT, load

INK = {"light": "#1f2328", "dark": "#e6edf3"}
GRID = {"light": "#d1d9e0", "dark": "#3d444d"}
EXACT = {"light": "#59636e", "dark": "#9198a1"}
APPROXIMATE = {"light": "#0969da", "dark": "#58a6ff"}
RAZOR = {"light": "#cf222e", "dark": "#ff7b72"}
# Case of the results -> its label, colors, and the label's offset in points and alignment.
SHOWN = {
    "full": ("full fine-tuning", EXACT, (0, 10), "center"),
    "accumulate 4": ("2 micro-batches", EXACT, (10, 2), "left"),  # of 4 of 8 images
    "accumulate 2": ("4 micro-batches", EXACT, (10, 2), "left"),
    "checkpoint": ("checkpointing", EXACT, (0, -22), "center"),
    "backrazor at 0.9": ("Back Razor 0.9", APPROXIMATE, (10, -2), "left"),
    "prebackrazor++ at 0.9": ("PreBackRazor++ 0.9", APPROXIMATE, (8, 11), "right"),
    "razor at 0.9": ("razor 0.9", RAZOR, (0, -26), "center"),
}
LEVELS: dict[int, tuple[str, dict[str, str], str]] = {  # of results/allocate.json
    0: ("nothing", EXACT, "--"),
    2: ("functions and attention", EXACT, "-"),
    3: ("q, k, v too: two copies a block", APPROXIMATE, "-"),
    4: ("norms too: one copy a block", RAZOR, "-"),
}
WIDTHS = {"narrow": "activations of 16 bits", "wide": "activations of 32 bits"}
TICKS = (1, 2, 3, 5, 10, 20)  # percent
SIZE = 13  # of text, in points of a picture that is 6.4 inches wide: legible on a phone


def points() -> dict[str, tuple[float, float]]:
    """The step time against full, and the peak in MiB, of each case that is shown."""
    rows = {row["case"]: row for row in load("frontier_cpu")["rows"]}
    return {
        case: (round(rows[case]["step_time_vs_full"], 3), round(rows[case]["peak_bytes"] / MIB, 1))
        for case in SHOWN
    }


def fronts() -> dict[tuple[str, int], list[tuple[float, float]]]:
    """The kept bytes, of those of full, and the relative error, by width and level.

    They are those of combinations for models with attention that none up to the level beats.
    """
    fronts = load("allocate")["choices"]["attention"]
    lines: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for (width, choices), level in itertools.product(fronts.items(), LEVELS):
        least = math.inf
        upto = [choice for choice in choices if choice["level"] <= level]
        for choice in sorted(upto, key=lambda choice: (-choice["ratio"], choice["error"])):
            if choice["error"] < least:
                least = choice["error"]
                point = round(1 - choice["ratio"], 3), round(math.sqrt(least), 4)
                lines.setdefault((width, level), []).append(point)
    return lines


def words(name: str) -> str:
    """The points of a picture as text."""
    if name == "memory-time":
        return "; ".join(f"{case}: {peak} MiB, {time}" for case, (time, peak) in points().items())
    return "; ".join(f"{width}, {level}: {line}" for (width, level), line in fronts().items())


def memory_time(pyplot: Any, mode: str) -> Any:
    figure, axes = pyplot.subplots(figsize=(6.4, 4.8), layout="constrained")
    for case, (time, peak) in points().items():
        text, colors, offset, side = SHOWN[case]
        razor = colors is RAZOR
        font = {"color": colors[mode], "weight": "bold" if razor else "normal"}
        axes.plot(time, peak, "o", color=colors[mode], markersize=12 if razor else 8)
        axes.annotate(text, (time, peak), offset, textcoords="offset points", ha=side, **font)
    axes.set_xlim(0, 1.7)
    axes.set_ylim(0, 720)
    axes.set_xlabel("step time, full fine-tuning = 1", color=INK[mode])
    axes.set_ylabel("peak memory of a step, MiB", color=INK[mode])
    style(axes, mode)
    return figure


def bytes_error(pyplot: Any, mode: str) -> Any:
    figure, both = pyplot.subplots(1, 2, figsize=(9.6, 4.8), layout="constrained", sharey=True)
    for (width, title), axes in zip(WIDTHS.items(), both, strict=True):
        for level, (text, colors, form) in LEVELS.items():
            shares, errors = zip(*fronts()[width, level], strict=True)
            percents = [100 * share for share in shares]
            axes.plot(percents, errors, form, color=colors[mode], label=text)
        axes.set(xscale="log", yscale="log", xlim=(1, 30), xticks=TICKS, ylim=(0.01, 1))
        axes.set_xticks([], minor=True)
        axes.set_xticklabels([f"{tick} %" for tick in TICKS])
        axes.set_title(title, color=INK[mode])
        axes.set_xlabel("stored for backward, relative to full fine-tuning", color=INK[mode])
        style(axes, mode)
    both[0].set_ylabel("relative error of the gradient", color=INK[mode])
    legend = both[0].legend(labelcolor=INK[mode], frameon=False, loc="lower left")
    legend.set_title("recomputed in backward", {"size": SIZE})
    legend.get_title().set_color(INK[mode])
    return figure


def style(axes: Any, mode: str) -> None:
    axes.tick_params(colors=INK[mode])
    axes.grid(color=GRID[mode], linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID[mode])


PICTURES: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "memory-time": ("Peak memory against step time", memory_time),
    "bytes-error": ("Stored bytes against the error of the gradient", bytes_error),
}


def draw(name: str, mode: str) -> None:
    import matplotlib as mpl  # slow, and not for --check

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "razorctl", "font.size": SIZE})
    from matplotlib import pyplot as plt

    title, picture = PICTURES[name]
    figure = picture(plt, mode)
    about = {"Date": None, "Title": title, "Description": words(name)}
    figure.savefig(path(name, mode), transparent=True, metadata=about)
    plt.close(figure)


def path(name: str, mode: str) -> Path:
    """The file of a picture."""
    return ROOT / f"scripts/assets/{name}-{mode}.svg"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="draw nothing, compare")
    every = list(itertools.product(PICTURES, INK))
    if not parser.parse_args().check:
        for one in every:
            draw(*one)
        return 0
    old = [p for n, m in every if not (p := path(n, m)).exists() or words(n) not in p.read_text()]
    for file in old:
        print(f"{file.relative_to(ROOT)} is of other results; run scripts/bench/picture.py.")
    return int(bool(old))


if __name__ == "__main__":
    sys.exit(main())
