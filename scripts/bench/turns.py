"""Runs take turns, so that all meet the same machine: the loop of linear.py, step.py, frontier.py.

Runs come in groups; the first of a group is that of full, which the others are compared with.
"""

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from machine import device_name
from pages import RESULTS, Row
from record import head, options, write
from torch import Tensor

from razorctl.layers.kinds.linear import Linear
from razorctl.ops import kernels


class Result:
    """The JSON file of a script: the head, and a row for each run."""

    def __init__(
        self,
        out: Path,
        document: Row,
        groups: list[list[Any]],
        as_row: Callable[[Any, list[Any]], Row],
    ) -> None:
        self.out, self.document, self.groups, self.as_row = out, document, groups, as_row

    def write(self) -> list[Row]:
        """Writes the file, and returns its rows."""
        rows = [self.as_row(run, group) for group in self.groups for run in group]
        write(self.out, {**self.document, "rows": rows})
        return rows


def take_turns(bench: Any, result: Result, start: float, seconds: float) -> None:
    """Checks, measures and times all runs; writes the result after each.

    Nothing starts so many seconds after `start` but what full is compared with, and nothing is
    compiled after half of them.
    """
    exact: list[list[Tensor]] = [[] for _ in result.groups]
    for turn in range(bench.workload.turns):
        for group, outputs in zip(result.groups, exact, strict=True):
            for run in group:
                passed = time.monotonic() - start
                if passed > seconds and (turn or run is not group[0]):
                    continue
                if turn == 0:
                    if run.compiled and passed > seconds / 2:
                        run.error = "not compiled in the seconds given"
                    run.attempt(bench.check, outputs)
                    run.attempt(bench.measure)
                run.attempt(bench.time)
                result.write()


def arguments(description: str | None) -> argparse.Namespace:
    """The command line of a script whose runs take turns."""
    parser = options(description)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument(
        "--seconds",
        type=float,
        default=1e9,
        help="after which nothing starts; nothing is compiled after half of them",
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model and one turn")
    return parser.parse_args()


def main(
    script: str,
    description: str | None,
    workloads: Mapping[str, Any],
    smoke: Mapping[str, Any],
    build: Callable[[Any, torch.device], Any],
    groups: Callable[[Any], list[list[Any]]],
    as_row: Callable[[Any, list[Any]], Row],
    as_text: Callable[[list[Row]], str],
    libraries: tuple[str, ...],
    **about: Any,
) -> None:
    """Runs a script whose runs take turns.

    Args:
        script: its name, without the suffix.
        description: its docstring.
        workloads: kind of device -> what is timed there.
        smoke: the fields of a workload that `--smoke` changes.
        build: makes a bench of a workload and a device.
        groups: makes the runs of a bench.
        as_row: makes the row of a run and its group.
        as_text: makes a table of all rows.
        libraries: whose versions the result has.
        about: more entries of the result.
    """
    start, args = time.monotonic(), arguments(description)
    workload, device = workloads[args.device], torch.device(args.device)
    workload = replace(workload, **smoke) if args.smoke else workload
    bench = build(workload, device)
    document = {
        **head(device_name(args.device), *libraries),
        "kernels": kernels.state(device),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        **asdict(workload),
        **about,
    }
    out = args.out or RESULTS / f"{script}_{args.device}.json"
    result = Result(out, document, groups(bench), as_row)
    # No layer of a tiny model is large enough for int8.
    with patch.object(Linear, "SMALLEST", 0 if args.smoke else Linear.SMALLEST):
        take_turns(bench, result, start, args.seconds)
    print(as_text(result.write()))
    print(f"written to {out}")
