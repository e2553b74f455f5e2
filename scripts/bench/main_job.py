"""Runs the main job with every method: accuracy, time of the process, step time against full.

    .venv/bin/python scripts/bench/main_job.py

The script runs `razorctl finetune vit-micro digits` with each method in turn, for each seed, and
writes results/main_job.json. It exits with 1 if a method of BARS has too low an accuracy or takes
over a minute.
"""

import json
import subprocess
import sys
import tempfile
import time
from statistics import fmean, median

from machine import device_name
from record import head, options, write
from rich.console import Console
from rich.table import Table

from razorctl.methods import DEFAULT_METHOD, METHODS
from razorctl.units import size

# A name, and the flags of its run beside the ratio.
CASES = {
    **{method: ["--method", method] for method in METHODS},
    "prebackrazor, scaled by 1/p": ["--method", "prebackrazor", "--unbiased"],
}
BARS = {"full": 0.96, DEFAULT_METHOD: 0.93}
SECONDS = 60


def run(flags: list[str], seed: int) -> dict[str, float]:
    """One fine-tuning run in a process of its own, imports and evaluation included."""
    args = ["finetune", "vit-micro", "digits", *flags, "--ratio", "0.9", "--seed", str(seed)]
    with tempfile.TemporaryDirectory() as tmp:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "razorctl", *args, "--out", f"{tmp}/run", "--json"],
            check=True,
            stdout=subprocess.PIPE,
        )
        wall = time.perf_counter() - start
    document = json.loads(done.stdout)
    keys = ("accuracy", "step_seconds", "saved_bytes", "full_saved_bytes")
    return {"wall_seconds": wall, **{key: document[key] for key in keys}}


def main() -> None:
    parser = options(__doc__, "main_job")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()

    runs: dict[str, list[dict[str, float]]] = {method: [] for method in CASES}
    for seed in range(args.seeds):
        for method, done in runs.items():
            done.append(run(CASES[method], seed))
    rows = [
        {
            "method": method,
            "ratio": 0.0 if method == "full" else 0.9,
            "accuracy": fmean(r["accuracy"] for r in done),
            "accuracy_min": min(r["accuracy"] for r in done),
            "wall_seconds_max": max(r["wall_seconds"] for r in done),
            "step_time_vs_full": median(
                r["step_seconds"] / full["step_seconds"]
                for r, full in zip(done, runs["full"], strict=True)
            ),
            "saved_bytes": done[0]["saved_bytes"],
            "full_saved_bytes": done[0]["full_saved_bytes"],
        }
        for method, done in runs.items()
    ]
    missed = [
        row["method"]
        for row in rows
        if row["method"] in BARS
        and (row["accuracy_min"] < BARS[row["method"]] or row["wall_seconds_max"] > SECONDS)
    ]
    document = {
        **head(device_name(), "torch", "timm"),
        "seeds": args.seeds,
        "bars": {"accuracy_min": BARS, "wall_seconds_max": SECONDS, "missed": missed},
        "rows": rows,
    }
    write(args.out, document)

    table = Table()
    for heading in ("method", "kept", "accuracy", "lowest", "longest run", "step time vs full"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for row in rows:
        table.add_row(
            row["method"],
            size(row["saved_bytes"]),
            f"{row['accuracy']:.4f}",
            f"{row['accuracy_min']:.4f}",
            f"{row['wall_seconds_max']:.0f} s",
            f"{row['step_time_vs_full']:.2f}",
        )
    Console().print(table)
    sys.exit(f"bars missed: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
