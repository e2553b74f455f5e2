"""Draws the losses and evaluations of every task that accuracy.sh has run, for the results page.

    .venv/bin/python scripts/bench/curves.py [--check]

The script reads results/accuracy-*.json and writes scripts/assets/curves-*.svg. Time is in steps of
`full`, measured in turns; what was not timed is drawn by steps alone. `--check` draws nothing, and
exits with 1 if a picture was drawn from other results.
"""

import argparse
import hashlib
import json
import sys
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

from pages import LOSS_EVERY, RESULTS, ROOT, Row, load

SIZE = (10, 3.8)  # inches
COLORS = {"full": "#1f2328", "razor": "#cf222e"}  # of the cases in every picture
OTHERS = ("C0", "C1", "C2", "C4", "C5", "C6", "C7", "C8", "C9")  # none is as red as razor's


def picture(name: str) -> Path:
    """Where the picture of a results file is."""
    return ROOT / f"scripts/assets/curves-{name.removeprefix('accuracy-')}.svg"


def drawn() -> list[str]:
    """The names of the results files that have rows."""
    names = sorted(path.stem for path in RESULTS.glob("accuracy-*.json"))
    return [name for name in names if load(name)["rows"]]


def lines(document: Row) -> list[Row]:
    """The lines of each case: means over its seeds, and the time of its step."""
    cases = []
    for row in (row for row in document["rows"] if not row["error"]):
        runs = [
            run
            for run in document["runs"]
            if (run["case"], run["rate"]) == (row["case"], row["learning_rate"])
        ]
        evaluations = zip(*(run["curve"] for run in runs), strict=True)
        cases.append(
            {
                "case": row["case"],
                "time": row["step_time_vs_full"],
                "losses": [fmean(each) for each in zip(*(r["losses"] for r in runs), strict=True)],
                "curve": [(at[0][0], fmean(value for _, value in at)) for at in evaluations],
            }
        )
    return cases


def words(document: Row) -> str:
    """A digest of the lines, by which pictures of other results are recognized."""
    return hashlib.sha256(json.dumps(lines(document)).encode()).hexdigest()


def draw(name: str) -> None:
    import matplotlib as mpl  # slow, and not for --check

    mpl.use("agg")
    mpl.rcParams.update({"svg.hashsalt": "razorctl", "font.size": 8})
    from matplotlib import pyplot as plt

    document = load(name)
    metric = document["rows"][0]["metric"].replace("_", " ")
    cases = lines(document)
    timed = any(line["time"] is not None for line in cases)
    width, height = SIZE
    size = (width if timed else 2 / 3 * width, height)
    figure, (loss, by_step, *by_time) = plt.subplots(
        1, 3 if timed else 2, figsize=size, layout="constrained"
    )
    others = cycle(OTHERS)
    for line in cases:
        case, time = line["case"], line["time"] if timed else 1.0
        style: dict[str, Any] = {"linewidth": 2 if case == "razor" else 1, "label": case}
        style["color"] = COLORS.get(case) or next(others)
        steps, values = zip(*line["curve"], strict=True)
        mark = {**style, "marker": ".", "markersize": 4}
        by_step.plot(steps, values, **mark)
        if time is not None:
            at = [LOSS_EVERY * i * time for i in range(len(line["losses"]))]
            loss.plot(at, line["losses"], **style)
            for axes in by_time:
                axes.plot([step * time for step in steps], values, **mark)
    unit = "time, steps of full" if timed else "steps"
    for axes, x, y in (
        (loss, unit, "training loss"),
        (by_step, "steps", f"validation {metric}"),
        *((axes, unit, f"validation {metric}") for axes in by_time),
    ):
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(color="#d1d9e0", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *by_step.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False
    )
    about = {"Date": None, "Title": document["summary"], "Description": words(document)}
    figure.savefig(picture(name), metadata=about)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="draw nothing, compare")
    if not parser.parse_args().check:
        for name in drawn():
            draw(name)
        return 0
    old = [
        picture(name)
        for name in drawn()
        if not picture(name).exists() or words(load(name)) not in picture(name).read_text()
    ]
    for path in old:
        print(f"{path.relative_to(ROOT)} is of other results; run scripts/bench/curves.py.")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
