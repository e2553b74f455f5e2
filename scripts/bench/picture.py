"""Draws the peak memory of every method against its step time, for README.md.

    .venv/bin/python scripts/bench/picture.py [--check]

The script reads results/step_cpu.json and writes scripts/assets/memory-time-{light,dark}.svg.
Each picture has its points as text too. Drawing needs the `bench` extra. `--check` draws nothing,
needs no extra, and exits with 1 if a picture was drawn from other results.
"""

import argparse
import sys

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
# Offset of a label from its point, in points, and its alignment; others are to the right of it.
PLACES = {
    "prebackrazor-": (0, 9, "left"),
    "prebackrazor": (0, -16, "left"),
    "prebackrazor++": (-3, 9, "left"),
    "prebackrazor++, joint budget 0.5": (7, -9, "left"),
    "checkpoint": (0, 8, "center"),
    "int8": (8, -2, "left"),
    "half": (8, -1, "left"),
    "razor": (-8, -4, "right"),
    "accumulate 2": (-8, -4, "right"),
    "backrazor": (0, 9, "center"),
}
LABELS = {"accumulate 2": "full, micro-batches of 2"}


def points() -> list[tuple[str, float, float]]:
    """The case, peak in MiB and step time against full of each point."""
    return [
        (row["case"], round(row["peak_bytes"] / MIB, 1), round(row["step_time_vs_full"], 3))
        for row in load("step_cpu")["rows"]
        if not row["error"]
    ]


def words() -> str:
    return "; ".join(f"{case}: {peak} MiB, {time}" for case, peak, time in points())


def group(case: str) -> str:
    if case.startswith("razor"):
        return "razor"
    if "backrazor" in case:
        return "pruning, of the papers"
    return "few bits" if case in ("half", "int8", "int2") else "exact"


def draw(mode: str) -> None:
    import matplotlib as mpl  # --check needs no matplotlib

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "razorctl", "font.size": 10})
    from matplotlib import pyplot as plt

    ink = INK[mode]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name, colors in COLORS.items():
        mine = [(time, peak) for case, peak, time in points() if group(case) == name]
        times, peaks = zip(*mine, strict=True)
        size = 70 if name == "razor" else 36
        axes.scatter(times, peaks, s=size, color=colors[mode], label=name, zorder=3)
    for case, peak, time in points():
        x, y, side = PLACES.get(case, (8, -4, "left"))
        weight = "bold" if group(case) == "razor" else "normal"
        axes.annotate(
            *(LABELS.get(case, case), (time, peak), (x, y)),
            textcoords="offset points",
            ha=side,
            color=COLORS[group(case)][mode],
            weight=weight,
            size=9,
        )
    axes.set(xlim=(0.6, 2.6), ylim=(0, 790))
    axes.set_xlabel("time of a step, in steps of full (left is better)", color=ink)
    axes.set_ylabel("peak of a step, MiB (down is better)", color=ink)
    axes.tick_params(colors=ink)
    axes.grid(color=GRID[mode], linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID[mode])
    axes.legend(labelcolor=ink, frameon=False, loc="upper right")
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
