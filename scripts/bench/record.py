"""Shared by the benches: options, results, errors, the machine, and runs that take turns."""

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from pages import RESULTS, Column, Row, listing

from razorctl.layers.kinds.linear import Linear
from razorctl.ops import kernels
from razorctl.ops.gemm import has_vnni
from razorctl.planning.detect import Detected, preset_for
from razorctl.planning.gpus import Gpu
from razorctl.version import __version__

AHEAD = 4_000_000  # cycles that the card waits, so that the time of launching is not measured


def options(description: str | None, result: str | None = None) -> argparse.ArgumentParser:
    """A parser with --out, which is the file of that name in results/ by default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=result and RESULTS / f"{result}.json")
    return parser


def on_a_device(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The parser with --device, which is a CUDA device if there is one."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    return parser


def head(device: str | None, *libraries: str) -> Row:
    """The first entries of a result: command without its file, date, device if any, versions."""
    script, *words = sys.argv
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return {
        "command": shlex.join([f"scripts/bench/{Path(script).name}", *words]),
        "date": datetime.date.today().isoformat(),
        **({} if device is None else {"device": device}),
        "versions": versions(*libraries),
    }


def versions(*libraries: str) -> dict[str, str]:
    """The versions of razorctl, which need not be installed, and of libraries that are."""
    installed = {name: version(name) for name in libraries if find_spec(name)}
    return {"razorctl": __version__, **installed}


def device_name(device: str = "cpu") -> str:
    """The card, or the cores of the CPU and what their GEMMs run on: with VNNI int8 is faster."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    capability = torch.backends.cpu.get_cpu_capability()
    vnni = " with VNNI" if has_vnni() else ""
    return f"{os.cpu_count()} CPU cores, {platform.machine()}, {capability}{vnni}"


def preset() -> Gpu | None:
    """The preset of the current CUDA device, found by its properties in torch."""
    card = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = f"{card.major}.{card.minor}"
    return preset_for(Detected(card.name, card.total_memory, 0, capability, ()))


def write(file: Path, document: Row) -> None:
    """Writes a result at once: a limit on time may end this process anywhere."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(file)


def reason(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    line = next(iter(str(error).strip().splitlines()), "")[:300]
    return f"{type(error).__name__}: {line}"


def timed(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    """Seconds of a call after one more; on CUDA of the card, while the host runs ahead of it."""
    call()
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD)  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / calls


@dataclass(kw_only=True)
class Attempts:
    """Base of a run: after an error nothing more is done with it."""

    error: str | None = None
    compiled: ClassVar[bool] = False  # whether torch.compile makes the model

    def attempt(self, action: Callable[..., None], *args: Any) -> None:
        """Calls `action` with this run and `args`; an exception becomes the error."""
        if self.error is not None:
            return
        try:
            action(self, *args)
        except Exception as error:  # running out of memory too
            self.error = reason(error)


class Result:
    """The JSON file of runs that take turns: the head, and a row for each run.

    groups: of runs; the first of a group is that of full, which the others are compared with.
    """

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
    """Checks, measures and times all runs in turns; writes the result after each.

    Nothing starts so many seconds after `start` but what full is compared with, and nothing is
    compiled after half of them.
    """
    exact: list[list[torch.Tensor]] = [[] for _ in result.groups]
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


def run_in_turns(
    script: str,
    description: str | None,
    workloads: Mapping[str, Any],
    smoke: Mapping[str, Any],
    build: Callable[[Any, torch.device], Any],
    groups: Callable[[Any], list[list[Any]]],
    as_row: Callable[[Any, list[Any]], Row],
    names: tuple[str, ...],
    columns: tuple[Column, ...],
    libraries: tuple[str, ...],
    **about: Any,
) -> None:
    """Runs a script whose runs take turns, so that all meet the same machine.

    Args:
        workloads: kind of device -> what is timed there, of which `--smoke` changes some fields.
        build: makes a bench of a workload and a device.
        groups: makes the runs of a bench.
        as_row: makes the row of a run and its group.
        names, columns: of the rows that are printed, see `listing`.
        about: more entries of the result.
    """
    start, parser = time.monotonic(), on_a_device(options(description))
    when = "after which nothing starts; nothing is compiled after half of them"
    parser.add_argument("--seconds", type=float, default=1e9, help=when)
    parser.add_argument("--smoke", action="store_true", help="a tiny model and one turn")
    args = parser.parse_args()
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
    print(listing(result.write(), names, columns))
    print(f"written to {out}")
