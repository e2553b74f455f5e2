"""Whole training steps with every method: time, peak and saved memory against full.

    scripts/bench/gpu.sh
    .venv/bin/python scripts/bench/whole_step.py --device cpu --smoke

A step is forward, cross-entropy, backward, SGD with momentum and zero_grad, on random images. Cases
take turns on one model, so that its weights exist once; ratios to full are medians over the turns.
Writes results/whole_step_gpu.json, after every case. No time is reported for a case whose logits
or classifier bias gradient, which are exact by contract, differ from full's, and none at all if
the tests failed.
"""

import argparse
import datetime
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import razorctl
from razorctl import Recipe, restore, saved_bytes, sparsify
from razorctl.recipe import DEFAULT_METHOD, METHODS

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
# Relative distance between kernels that round differently.
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
STORED = "full, stored attention"
PROFILED = ("backrazor", "prebackrazor", "prebackrazor++")  # in bf16, unless --profile
OPS = 15  # rows of a profile
SMOKE = {
    "model": "vit_tiny_patch16_224",
    "image_size": 32,
    "batch_size": 8,
    "micro_batch_size": 4,
    "turns": 1,
    "steps": 2,
}
RESULT = Path(__file__).parent / "results" / "whole_step_gpu.json"


@dataclass(frozen=True)
class Case:
    """What is timed. reference: the case whose logits it must give. rows: of a micro-batch."""

    name: str
    recipe: Recipe
    reference: str
    rows: int


@dataclass
class Run:
    """What is known of a case in a precision.

    seconds: of a step, one figure a turn. error: why it is not timed. untraced: why its saved bytes
    are not known.
    """

    case: Case
    precision: str
    seconds: list[float] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    saved: int | None = None
    error: str | None = None
    untraced: str | None = None
    profile: list[dict[str, Any]] | None = None


class WrongError(Exception):
    """A case does not compute what it must."""


class Bench:
    """One model, one optimizer and one batch, which all cases share."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device = torch.device(args.device)
        size = {} if args.image_size is None else {"img_size": args.image_size}
        model = timm.create_model(args.model, **size)
        self.model: nn.Module = model.train().to(self.device)
        # Small, so that random labels and pruned gradients cannot carry the weights to infinity.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        channels, *default = timm.data.resolve_model_data_config(model)["input_size"]
        sides = default if args.image_size is None else [args.image_size] * 2
        self.x = torch.randn(args.batch_size, channels, *sides, device=self.device)
        self.labels = torch.randint(model.num_classes, (args.batch_size,), device=self.device)
        self.steps: int = args.steps

    @contextmanager
    def running(self, case: Case) -> Iterator[None]:
        """The model under a case's recipe, from an empty cache on; afterwards stock again."""
        if self.device.type == "cuda":
            gc.collect()  # a failed case before this one may have left cycles
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        sparsify(self.model, case.recipe)
        try:
            yield
        finally:
            self.optimizer.zero_grad()
            restore(self.model)

    def gradients(self, run: Run) -> list[Tensor]:
        """Forward and backward of the whole batch; returns the logits of each micro-batch."""
        dtype, logits = PRECISIONS[run.precision], []
        pieces = (torch.split(t, run.case.rows) for t in (self.x, self.labels))
        for x, labels in zip(*pieces, strict=True):
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
                y = self.model(x)
                loss = F.cross_entropy(y, labels) * (len(x) / len(self.x))
            loss.backward()  # type: ignore[no-untyped-call]
            logits.append(y.detach())
        return logits

    def step(self, run: Run) -> None:
        """What is timed."""
        self.gradients(run)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def trace(self, run: Run) -> None:
        """Finds the bytes saved for a backward pass."""
        dtype = PRECISIONS[run.precision]
        with self.running(run.case):
            run.saved = saved_bytes(self.model, self.x[: run.case.rows], autocast=dtype)

    def check(self, run: Run, exact: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Compares with an exact case; raises WrongError if it differs.

        exact: logits and classifier bias gradients of the exact cases, to which this one is added
        if it is one. Where the reference itself failed, any other serves: they differ by rounding.
        """
        with self.running(run.case):
            logits = torch.cat(self.gradients(run)).float()
            bias = self.model.get_classifier().bias.grad.float()  # type: ignore[operator]
        got = logits, bias
        reference = exact.get(run.case.reference) or next(iter(exact.values()), None)
        if reference is None and run.case.recipe.rules:
            raise WrongError("no exact case to compare with")
        for ours, theirs in zip(got, reference or got, strict=True):
            distance = torch.linalg.vector_norm(ours - theirs)
            if not distance <= TOLERANCE[run.precision] * torch.linalg.vector_norm(theirs):
                raise WrongError("differs from full")
        if not run.case.recipe.rules:
            exact[run.case.name] = got

    def time(self, run: Run) -> None:
        """One turn of a case: a warm-up step, then the timed ones."""
        with self.running(run.case):
            self.step(run)
            seconds = self.seconds(lambda: self.step(run))
            if self.device.type == "cuda":
                run.allocated.append(torch.cuda.max_memory_allocated())
                run.reserved.append(torch.cuda.max_memory_reserved())
        run.seconds.append(median(seconds))

    def seconds(self, step: Callable[[], None]) -> list[float]:
        """The time of each of some steps in a row."""
        if self.device.type == "cuda":
            # Events, so that the host may run ahead of the device as it does in training.
            event = partial(torch.cuda.Event, enable_timing=True)
            events = [event() for _ in range(self.steps + 1)]
            torch.cuda.synchronize()
            events[0].record()
            for done in events[1:]:
                step()
                done.record()
            torch.cuda.synchronize()
            return [a.elapsed_time(b) / 1000 for a, b in pairwise(events)]
        marks = [time.perf_counter()]
        for _ in range(self.steps):
            step()
            marks.append(time.perf_counter())
        return [b - a for a, b in pairwise(marks)]

    def profile(self, run: Run) -> None:
        """The ops of one step that take longest, without what they call; a table to stderr."""
        which = "cuda" if self.device.type == "cuda" else "cpu"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if which == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with self.running(run.case):
            self.step(run)
            with torch.profiler.profile(activities=activities) as profiler:
                self.step(run)
                if which == "cuda":
                    torch.cuda.synchronize()
        averages = profiler.key_averages()
        key = "self_cpu_time_total" if which == "cpu" else "self_device_time_total"
        print(f"\n{run.case.name}, {run.precision}", file=sys.stderr)
        print(averages.table(sort_by=f"self_{which}_time_total", row_limit=OPS), file=sys.stderr)
        # Ops alone: the kernels they launch are entries of their own, with the same time again.
        ops = [op for op in averages if op.device_type.name == "CPU"]
        ops.sort(key=lambda op: getattr(op, key), reverse=True)
        run.profile = [
            {"op": op.key, "seconds": getattr(op, key) / 1e6, "calls": op.count} for op in ops[:OPS]
        ]


def cases(ratio: float, batch_size: int, micro_batch_size: int) -> list[Case]:
    """Every case, the exact ones first."""

    def case(name: str, recipe: Recipe, rows: int = batch_size) -> Case:
        stored = recipe.rules and recipe.backend == "stored"
        return Case(name, recipe, STORED if stored else "full", rows)

    default = f"{DEFAULT_METHOD}, "
    return [
        case("full", Recipe("full")),
        case(STORED, Recipe("full", attention="stored")),
        case("checkpoint", Recipe("checkpoint")),
        case(f"accumulate {micro_batch_size}", Recipe("full"), micro_batch_size),
        *(
            case(name, Recipe(name, ratio))
            for name in METHODS
            if name not in ("full", "checkpoint")
        ),
        case(default + "flash attention", Recipe(DEFAULT_METHOD, ratio, attention="flash")),
        case(default + "joint budget 0.5", Recipe(DEFAULT_METHOD, ratio, joint_budget=0.5)),
    ]


def attempt(action: Callable[[Run], None], run: Run) -> str | None:
    """Does it; returns an exception, running out of memory too, as one line."""
    try:
        action(run)
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), "")[:300]
        return line if isinstance(error, WrongError) else f"{type(error).__name__}: {line}"
    return None


def versus(ours: float | None, full: float | None) -> float | None:
    """The ratio, where there are both."""
    return None if ours is None or not full else ours / full


def as_row(run: Run, full: Run, timed: bool) -> dict[str, Any]:
    """The row of a run; without times unless they are to be reported."""
    timed = timed and run.error is None and bool(run.seconds)
    turns = zip(run.seconds, full.seconds, strict=False)  # the clock may have cut the last turn
    peak, full_peak = (max(r.allocated, default=None) for r in (run, full))
    row: dict[str, Any] = {
        "case": run.case.name,
        "precision": run.precision,
        "step_seconds": median(run.seconds) if timed else None,
        "step_time_vs_full": (
            median(t / f for t, f in turns) if timed and full.error is None else None
        ),
        "peak_bytes": peak if run.error is None else None,
        "peak_reserved_bytes": max(run.reserved, default=None) if run.error is None else None,
        "peak_vs_full": versus(peak, full_peak) if run.error is None else None,
        "saved_bytes": run.saved,
        "saved_vs_full": versus(run.saved, full.saved),
        "error": run.error or (f"saved bytes: {run.untraced}" if run.untraced else None),
    }
    if run.profile is not None and timed:
        row["profile"] = run.profile
    return row


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """An aligned table."""

    def figure(value: float | None, unit: float, form: str) -> str:
        return "-" if value is None else format(value / unit, form)

    columns = {
        "step ms": ("step_seconds", 1e-3, ".1f"),
        "vs full": ("step_time_vs_full", 1, ".2f"),
        "peak MiB": ("peak_bytes", 2**20, ",.0f"),
        "peak vs full": ("peak_vs_full", 1, ".2f"),
        "saved MiB": ("saved_bytes", 2**20, ",.1f"),
        "saved vs full": ("saved_vs_full", 1, ".2f"),
    }
    table = [["case", "", *columns, ""]]
    for row in rows:
        figures = [figure(row[key], unit, form) for key, unit, form in columns.values()]
        table.append([row["case"], row["precision"], *figures, row["error"] or ""])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    aligns = ["<", "<", *">" * len(columns), "<"]
    return "\n".join(
        "  ".join(
            f"{cell:{a}{w}}" for cell, a, w in zip(line, aligns, widths, strict=True)
        ).rstrip()
        for line in table
    )


def versions() -> dict[str, str]:
    """Of what takes part; triton only where it is installed."""
    found = {"razorctl": razorctl.__version__, "torch": torch.__version__}
    for name in ("timm", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def command() -> str:
    """What the user typed: gpu.sh adds --tests, nobody else does."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tests")
    known, words = parser.parse_known_args()
    return " ".join([f"scripts/bench/{'gpu.sh' if known.tests else 'whole_step.py'}", *words])


def arguments() -> argparse.Namespace:
    out = Path(os.environ["OUT"], "whole_step.json") if os.environ.get("OUT") else RESULT
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--image-size", type=int, help="the model's own by default")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--precisions", type=lambda s: s.split(","), default=list(PRECISIONS))
    parser.add_argument("--ratio", type=float, default=0.9)
    parser.add_argument("--turns", type=int, default=5, help="at most; see --seconds")
    parser.add_argument("--steps", type=int, default=5, help="timed ones, in a turn of a case")
    parser.add_argument("--seconds", type=float, default=240, help="after which no turn starts")
    parser.add_argument("--profile", action="store_true", help="every case, not just three")
    parser.add_argument("--tests", type=Path, help="JSON with the outcome of the tests")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--out", type=Path, default=out)
    if parser.parse_args().smoke:
        parser.set_defaults(**SMOKE)
    args = parser.parse_args()
    if not set(args.precisions) <= PRECISIONS.keys():
        parser.error(f"precisions are {', '.join(PRECISIONS)}")
    return args


def main() -> None:
    start = time.monotonic()
    args = arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device; --device cpu --smoke rehearses without one")
    tests = json.loads(args.tests.read_text()) if args.tests else None
    sound = not tests or tests["failed"] == 0
    if args.smoke:
        torch.set_num_threads(1)  # tiny ops on a busy machine wait for each other's threads
    bench = Bench(args)
    cuda = bench.device.type == "cuda"
    runs = {
        precision: [
            Run(case, precision)
            for case in cases(args.ratio, args.batch_size, args.micro_batch_size)
        ]
        for precision in args.precisions
    }
    turns = 0

    def rows() -> list[dict[str, Any]]:
        return [as_row(run, group[0], sound) for group in runs.values() for run in group]

    def write() -> None:
        document = {
            "command": command(),
            "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name(bench.device)
            if cuda
            else f"{os.cpu_count()} CPU cores, {platform.machine()}",
            "versions": versions(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "model": args.model,
            "batch_size": args.batch_size,
            "ratio": args.ratio,
            "precisions": args.precisions,
            "turns": turns,
            "steps": args.steps,
            "tests": tests,
            "rows": rows(),
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=2) + "\n")

    for group in runs.values():
        exact: dict[str, tuple[Tensor, Tensor]] = {}
        for run in group:
            run.untraced = attempt(bench.trace, run)
            run.error = attempt(partial(bench.check, exact=exact), run)
            write()

    # Without times to report one turn is enough, for the peaks.
    for turn in range(args.turns if sound else 1):
        began = time.monotonic()
        for run in (run for group in runs.values() for run in group if run.error is None):
            if turn == 0 or time.monotonic() - start < args.seconds:
                run.error = attempt(bench.time, run)
                write()
        turns = turn + 1
        now = time.monotonic()
        if now + (now - began) - start > args.seconds:
            break

    for run in (run for group in runs.values() for run in group if run.error is None):
        usual = run.precision == "bf16" and run.case.name in PROFILED
        if sound and (usual or args.profile) and (failure := attempt(bench.profile, run)):
            print(f"{run.case.name}, {run.precision}, no profile: {failure}", file=sys.stderr)
    write()

    print(as_text(rows()))
    print(f"written to {args.out}")
    if tests and not sound:
        sys.exit(f"no times reported: the tests failed ({tests['summary']})")


if __name__ == "__main__":
    main()
