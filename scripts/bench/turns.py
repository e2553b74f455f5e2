"""Cases of whole training steps take turns on one set of weights, for step.py and frontier.py."""

import argparse
import datetime
import json
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
import transformers
from case import Bench, Case, Run, Workload
from machine import device_name
from torch import Tensor

import razorctl
from razorctl.methods import METHODS
from razorctl.ops import kernels

SMOKE = {"model": "vit_tiny_patch16_224", "image_size": 32, "depth": 2, "turns": 1, "steps": 1}
RESULTS = Path(__file__).parent / "results"


def runs(bench: Bench, cases: Callable[[Bench, str], Mapping[str, Case]]) -> list[list[Run]]:
    """A run of every case in every precision, compiled ones in the first; full is the first."""
    precisions = bench.workload.precisions
    return [
        [
            Run(name, case, precision)
            for name, case in cases(bench, precision).items()
            if precision == precisions[0] or not case.compiled
        ]
        for precision in precisions
    ]


def as_row(run: Run, group: list[Run]) -> dict[str, Any]:
    """The row of a run in the result; the group has the runs of its precision."""
    full, recipe = group[0], run.case.recipe
    twin = next((other for other in group if other.name == "full, compiled"), None)

    def over(other: Run) -> float | None:
        turns = [t / f for t, f in zip(run.seconds, other.seconds, strict=False)]  # one may be cut
        return median(turns) if turns and not run.error else None

    return {
        "case": run.name,
        "precision": run.precision,
        "ratio": recipe.ratio if METHODS[recipe.method].has_ratio else None,
        "step_seconds": median(run.seconds) if run.seconds and not run.error else None,
        "step_time_vs_full": over(full),
        "step_time_vs_full_compiled": over(twin) if twin and run.case.compiled else None,
        "saved_bytes": run.saved,
        "peak_bytes": run.peak,
        "peak_vs_full": run.peak / full.peak if run.peak and full.peak else None,
        "reserved_bytes": run.reserved,
        "error": run.error or (None if run.seconds else "not timed in the seconds given"),
    }


def as_text(rows: list[dict[str, Any]]) -> str:
    """The result as a table, without the libraries that a bare GPU machine may lack."""
    columns = {
        "step ms": ("step_seconds", 1e-3, ".1f"),
        "vs full": ("step_time_vs_full", 1, ".2f"),
        "vs compiled": ("step_time_vs_full_compiled", 1, ".2f"),
        "kept MiB": ("saved_bytes", 2**20, ",.1f"),
        "peak MiB": ("peak_bytes", 2**20, ",.0f"),
        "vs full ": ("peak_vs_full", 1, ".2f"),
    }
    lines = [f"{'case':53}" + "".join(f"{name:>12}" for name in columns)]
    for row in rows:
        figures = (
            "-" if row[key] is None else format(row[key] / unit, form)
            for key, unit, form in columns.values()
        )
        line = f"{row['case']:47} {row['precision']:5}" + "".join(f"{f:>12}" for f in figures)
        lines.append(f"{line}  {row['error'] or ''}".rstrip())
    return "\n".join(lines)


class Result:
    """The JSON file of a script: what is said of all rows, and the rows."""

    def __init__(self, out: Path, document: dict[str, Any], groups: list[list[Run]]) -> None:
        self.out, self.document, self.groups = out, document, groups

    def write(self) -> list[dict[str, Any]]:
        rows = [as_row(run, group) for group in self.groups for run in group]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        partial = self.out.with_suffix(".partial")  # a limit on time may end this process anywhere
        partial.write_text(json.dumps({**self.document, "rows": rows}, indent=2) + "\n")
        partial.replace(self.out)
        return rows


def take_turns(bench: Bench, result: Result, start: float, seconds: float) -> None:
    """Checks, measures and times all runs; writes the result after each.

    Nothing starts so many seconds after `start` but what full is compared with, and nothing is
    compiled after half of them.
    """
    exact: list[list[Tensor]] = [[] for _ in result.groups]
    for turn in range(bench.workload.turns):
        for group, logits in zip(result.groups, exact, strict=True):
            for run in group:
                took = time.monotonic() - start
                if took > seconds and (turn or run is not group[0]):
                    continue
                if turn == 0:
                    if run.case.compiled and took > seconds / 2:
                        run.error = "not compiled in the seconds given"
                    run.attempt(bench.check, logits)
                    run.attempt(bench.measure)
                run.attempt(bench.time)
                result.write()


def versions() -> dict[str, str]:
    libraries = (razorctl, torch, timm, transformers)
    found = {library.__name__: library.__version__ for library in libraries}
    return found | ({"torchao": version("torchao")} if find_spec("torchao") else {})


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=found)
    parser.add_argument(
        "--seconds",
        type=float,
        default=1e9,
        help="after which nothing starts; nothing is compiled after half of them",
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model and one turn")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main(
    script: str,
    description: str | None,
    workloads: Mapping[str, Workload],
    cases: Callable[[Bench, str], Mapping[str, Case]],
    **about: Any,
) -> None:
    """Runs the script of that name; `about` goes into its result."""
    start, args = time.monotonic(), arguments(description)
    workload, device = workloads[args.device], torch.device(args.device)
    workload = replace(workload, **SMOKE) if args.smoke else workload
    bench = Bench(workload, device)
    file = f"scripts/bench/{script}.py"
    document = {
        "command": shlex.join([file, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": device_name(args.device),
        "versions": versions(),
        "kernels": kernels.state(device),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        **asdict(workload),
        **about,
    }
    out = args.out or RESULTS / f"{script}_{args.device}.json"
    result = Result(out, document, runs(bench, cases))
    take_turns(bench, result, start, args.seconds)
    print(as_text(result.write()))
    print(f"written to {out}")
