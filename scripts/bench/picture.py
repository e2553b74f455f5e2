"""Draws the pictures of memory.md and of gradients.md.

    .venv/bin/python scripts/bench/picture.py [--check]

The script writes scripts/assets/compared-{light,dark}.svg, what methods need of a card against
their step time, from results/compared.json, and scripts/assets/bytes-error-{light,dark}.svg, the
stored bytes of `razor` against the error of its gradient, by what is recomputed, from
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

from pages import GIB, ROOT, load

INK = {"light": "#1f2328", "dark": "#e6edf3"}
GRID = {"light": "#d1d9e0", "dark": "#3d444d"}
EXACT = {"light": "#59636e", "dark": "#9198a1"}
APPROXIMATE = {"light": "#0969da", "dark": "#58a6ff"}
RAZOR = {"light": "#cf222e", "dark": "#ff7b72"}
LEVELS: dict[int, tuple[str, dict[str, str], str]] = {  # of results/allocate.json
    0: ("nothing", EXACT, "--"),
    2: ("functions and attention", EXACT, "-"),
    3: ("q, k, v too: two copies a block", APPROXIMATE, "-"),
    4: ("norms too: one copy a block", RAZOR, "-"),
}
WIDTHS = {"narrow": "activations of 16 bits", "wide": "activations of 32 bits"}
TICKS = (1, 2, 3, 5, 10, 20)  # percent
SIZE = 13  # of text, in points of a picture that is 6.4 inches wide: legible on a phone


def needs() -> dict[str, tuple[float, float]]:
    """The step time against full, and the needed GiB, of each method that was compared."""
    return {
        row["label"]: (round(1 / row["speedup_vs_full"], 2), round(row["needed_bytes"] / GIB, 2))
        for row in load("compared")["rows"]
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
    if name == "compared":
        return "; ".join(f"{case}: {most} GiB, {time}" for case, (time, most) in needs().items())
    return "; ".join(f"{width}, {level}: {line}" for (width, level), line in fronts().items())


def compared(pyplot: Any, mode: str) -> Any:
    budget = load("compared")["budget_bytes"] / GIB
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    axes.axhline(budget, color=INK[mode], linestyle="--", linewidth=1)
    axes.annotate(
        f"memory of the card, {budget:g} GiB", (0.02, budget), color=INK[mode], va="bottom"
    )
    for case, (time, most) in needs().items():
        colors, offset = (RAZOR if case == "razor" else EXACT), (0, 10 if most > budget else -24)
        text = f"{case}, does not fit" if most > budget else case
        axes.plot(time, most, "o", color=colors[mode], markersize=12 if case == "razor" else 8)
        place: dict[str, Any] = {"textcoords": "offset points", "ha": "center"}
        axes.annotate(text, (time, most), offset, color=colors[mode], **place)
    axes.set(xlim=(0, 1.7), ylim=(0, 1.25 * max(most for _, most in needs().values())))
    axes.set_xlabel("step time, full fine-tuning = 1", color=INK[mode])
    axes.set_ylabel("needed memory, GiB", color=INK[mode])
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
    "compared": ("Needed memory against step time", compared),
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
