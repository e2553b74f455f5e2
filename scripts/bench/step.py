"""Times whole training steps with every method, and measures their memory, against full.

    .venv/bin/python scripts/bench/step.py
    scripts/bench/gpu.sh

A step is forward, cross-entropy, backward, SGD with momentum and zero_grad, on random images. On a
CUDA device it is of ViT-B/16, batch 128, in fp32 and bf16; on a CPU of ViT-S/16, batch 8, in fp32.
Cases take turns on one model, so that its weights exist once; ratios to full are medians over the
turns. The peak is measured on CUDA and traced on a CPU. The script writes
results/step_DEVICE.json after every turn of a case. The logits and the bias gradient of the
classifier are exact by contract: a case in which they differ from those of full gets no time.
"""

import argparse
import datetime
import gc
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import razorctl
from razorctl import Recipe, restore, saved_bytes, sparsify
from razorctl.memory.tracker import peak_bytes
from razorctl.methods import METHODS
from razorctl.ops import kernels

RATIO = 0.9
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
# Relative distance between kernels that round differently; stored attention is one of them.
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}
# Small, so that random labels and pruned gradients cannot carry the weights to infinity.
SGD = partial(torch.optim.SGD, lr=1e-4, momentum=0.9)
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Workload:
    """What is timed. turns: the most that are run; see --seconds. steps: timed in each turn of a
    case.
    """

    model: str
    batch_size: int
    micro_batch_size: int
    precisions: tuple[str, ...]
    turns: int
    steps: int
    image_size: int = 224


WORKLOADS = {
    "cuda": Workload("vit_base_patch16_224", 128, 16, ("fp32", "bf16"), turns=5, steps=5),
    "cpu": Workload("vit_small_patch16_224", 8, 2, ("fp32",), turns=7, steps=1),
}
SMOKE = {"model": "vit_tiny_patch16_224", "image_size": 32, "turns": 1, "steps": 1}


@dataclass
class Run:
    """A case in a precision, and what is known of it.

    rows: of a micro-batch. seconds: of a step, one figure for each turn. error: why the case is not
    timed.
    """

    case: str
    recipe: Recipe
    rows: int
    precision: str
    seconds: list[float] = field(default_factory=list)
    saved: int | None = None
    peak: int | None = None
    reserved: int | None = None
    error: str | None = None

    def attempt(self, action: Any, *args: Any) -> None:
        """Calls `action` with this run, unless it has failed before; an exception becomes its
        error.
        """
        try:
            if self.error is None:
                action(self, *args)
        except Exception as error:  # running out of memory too
            line = next(iter(str(error).strip().splitlines()), "")[:300]
            self.error = f"{type(error).__name__}: {line}"


class Bench:
    """One model, one optimizer and one batch, which all cases share."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device, self.steps = device, workload.steps
        model = timm.create_model(workload.model, img_size=workload.image_size)
        self.model: nn.Module = model.train().to(device)
        self.optimizer = SGD(self.model.parameters())
        sides = [workload.image_size] * 2
        self.x = torch.randn(workload.batch_size, 3, *sides, device=device)
        self.labels = torch.randint(model.num_classes, (workload.batch_size,), device=device)

    @contextmanager
    def running(self, run: Run) -> Iterator[None]:
        """The model under the recipe of a case, with an empty cache; stock again afterwards."""
        if self.device.type == "cuda":
            gc.collect()  # a failed case before this one may have left cycles
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        sparsify(self.model, run.recipe)
        try:
            yield
        finally:
            self.optimizer.zero_grad()
            restore(self.model)

    def gradients(self, run: Run) -> list[Tensor]:
        """Runs forward and backward of the whole batch; returns the logits of each micro-batch."""
        dtype, logits = PRECISIONS[run.precision], []
        pieces = (torch.split(t, run.rows) for t in (self.x, self.labels))
        for x, labels in zip(*pieces, strict=True):
            with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
                y = self.model(x)
                loss = F.cross_entropy(y, labels) * (len(x) / len(self.x))
            loss.backward()  # type: ignore[no-untyped-call]
            logits.append(y.detach())
        return logits

    def check(self, run: Run, exact: list[Tensor]) -> None:
        """Compares what is exact by contract with that of full, which the first run puts in
        `exact`.
        """
        with self.running(run):
            logits = torch.cat(self.gradients(run)).float()
            got = [logits, self.model.get_classifier().bias.grad.float()]  # type: ignore[operator]
        exact[:] = exact or got
        for ours, theirs in zip(got, exact, strict=True):
            distance = torch.linalg.vector_norm(ours - theirs)
            if not distance <= TOLERANCE[run.precision] * torch.linalg.vector_norm(theirs):
                raise ArithmeticError("differs from full where it must not")

    def trace(self, run: Run) -> None:
        """Traces the bytes saved, and the peak if none can be measured."""
        x, autocast = self.x[: run.rows], PRECISIONS[run.precision]
        with self.running(run):
            run.saved = saved_bytes(self.model, x, autocast=autocast)
            if self.device.type == "cpu":
                more = len(x) < len(self.x)
                run.peak = peak_bytes(self.model, x, SGD, autocast=autocast, accumulate=more)

    def time(self, run: Run) -> None:
        """Runs one turn of a case: a warm-up step, then the timed steps."""

        def step() -> None:
            self.gradients(run)
            self.optimizer.step()
            self.optimizer.zero_grad()

        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        with self.running(run):
            step()
            wait()
            start = time.perf_counter()
            for _ in range(self.steps):  # the host may run ahead, as it does in training
                step()
            wait()
            if failed := kernels.failures():  # what would be timed is the way around them
                raise RuntimeError(f"kernels failed: {', '.join(op for op, _ in failed)}")
            run.seconds.append((time.perf_counter() - start) / self.steps)
            if self.device.type == "cuda":
                run.peak = max(run.peak or 0, torch.cuda.max_memory_allocated())
                run.reserved = max(run.reserved or 0, torch.cuda.max_memory_reserved())


def runs(workload: Workload) -> list[list[Run]]:
    """A run of every case in every precision; those of full are first."""
    rows, few = workload.batch_size, workload.micro_batch_size
    pruning = [name for name, method in METHODS.items() if method.approximates]
    sheared, razor = Recipe("prebackrazor++", RATIO), Recipe("razor", RATIO)
    cases = {
        "full": (Recipe("full"), rows),
        "full, stored attention": (Recipe("full", attention="stored"), rows),
        "checkpoint": (Recipe("checkpoint"), rows),
        f"accumulate {few}": (Recipe("full"), few),
        **{name: (Recipe(name, RATIO), rows) for name in pruning},
        "prebackrazor++, flash": (replace(sheared, attention="flash"), rows),
        "prebackrazor++, joint budget 0.5": (replace(sheared, joint_budget=0.5), rows),
        "razor, branches 0.5": (replace(razor, joint_budget=0.5, joint="branches"), rows),
    }
    return [
        [Run(case, *settings, precision) for case, settings in cases.items()]
        for precision in workload.precisions
    ]


def as_row(run: Run, full: Run) -> dict[str, Any]:
    """The row of a run in the result."""
    turns = [t / f for t, f in zip(run.seconds, full.seconds, strict=False)]  # the last may be cut
    return {
        "case": run.case,
        "precision": run.precision,
        "step_seconds": median(run.seconds) if turns and not run.error else None,
        "step_time_vs_full": median(turns) if turns and not run.error else None,
        "saved_bytes": run.saved,
        "peak_bytes": run.peak,
        "peak_vs_full": run.peak / full.peak if run.peak and full.peak else None,
        "reserved_bytes": run.reserved,
        "error": run.error,
    }


def as_text(rows: list[dict[str, Any]]) -> str:
    """The result as a table, without the libraries that a bare GPU machine may lack."""
    columns = {
        "step ms": ("step_seconds", 1e-3, ".1f"),
        "vs full": ("step_time_vs_full", 1, ".2f"),
        "saved MiB": ("saved_bytes", 2**20, ",.1f"),
        "peak MiB": ("peak_bytes", 2**20, ",.0f"),
        "vs full ": ("peak_vs_full", 1, ".2f"),
    }
    lines = [f"{'case':39}" + "".join(f"{name:>11}" for name in columns)]
    for row in rows:
        figures = (
            "-" if row[key] is None else format(row[key] / unit, form)
            for key, unit, form in columns.values()
        )
        line = f"{row['case']:33} {row['precision']:5}" + "".join(f"{f:>11}" for f in figures)
        lines.append(f"{line}  {row['error'] or ''}".rstrip())
    return "\n".join(lines)


def main() -> None:
    start = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=WORKLOADS, default=found)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no turn starts")
    parser.add_argument(
        "--include",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "FILE"),
        help="a JSON file that goes into the result under that name",
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model and one turn")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    workload = WORKLOADS[args.device]
    workload = replace(workload, **SMOKE) if args.smoke else workload
    out = args.out or RESULTS / f"step_{args.device}.json"
    device = torch.device(args.device)
    bench, groups = Bench(workload, device), runs(workload)
    cpu = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    libraries = (razorctl, torch, timm, transformers)
    document = {
        "command": shlex.join(["scripts/bench/step.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "device": cpu if args.device == "cpu" else torch.cuda.get_device_name(device),
        "versions": {library.__name__: library.__version__ for library in libraries},
        "kernels": kernels.state(device),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        **asdict(workload),
        "ratio": RATIO,
        **{name: json.loads(Path(file).read_text()) for name, file in args.include},
    }

    def write() -> list[dict[str, Any]]:
        rows = [as_row(run, group[0]) for group in groups for run in group]
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_suffix(".partial")  # a limit on time may end this process anywhere
        partial.write_text(json.dumps({**document, "rows": rows}, indent=2) + "\n")
        partial.replace(out)
        return rows

    for group in groups:
        exact: list[Tensor] = []
        for run in group:
            run.attempt(bench.trace)
            run.attempt(bench.check, exact)
    for turn in range(workload.turns):
        for run in (run for group in groups for run in group):
            if turn == 0 or time.monotonic() - start < args.seconds:
                run.attempt(bench.time)
                write()
    print(as_text(write()))
    print(f"written to {out}")


if __name__ == "__main__":
    main()
