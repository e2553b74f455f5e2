"""Draws the peak memory of a step against its time, by method, for README.md.

    .venv/bin/python scripts/bench/picture.py [--check]

The script reads results/frontier_cpu.json and writes scripts/assets/memory-time-{light,dark}.svg.
Each picture has its points as text too. `--check` draws nothing, and exits with 1 if a picture was
drawn from other results.
"""

import argparse
import sys

from pages import MIB, ROOT, load

PICTURES = {mode: ROOT / f"scripts/assets/memory-time-{mode}.svg" for mode in ("light", "dark")}
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
SIZE = 13  # of text, in points of a picture that is 6.4 inches wide: legible on a phone


def points() -> dict[str, tuple[float, float]]:
    """The step time against full, and the peak in MiB, of each case that is shown."""
    rows = {row["case"]: row for row in load("frontier_cpu")["rows"]}
    return {
        case: (round(rows[case]["step_time_vs_full"], 3), round(rows[case]["peak_bytes"] / MIB, 1))
        for case in SHOWN
    }


def words() -> str:
    return "; ".join(f"{case}: {peak} MiB, {time}" for case, (time, peak) in points().items())


def draw(mode: str) -> None:
    import matplotlib as mpl  # slow, and not for --check

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "razorctl", "font.size": SIZE})
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.8), layout="constrained")
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
    axes.tick_params(colors=INK[mode])
    axes.grid(color=GRID[mode], linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID[mode])
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
