"""Times one linear layer with every way to keep its input, against full, at many ratios.

    .venv/bin/python scripts/bench/linear.py

This is the measurement of Sheared Backpropagation, Fig. 1 and Tab. 3: a layer with inputs of shape
[128, 197, 768] in fp32. The paper names neither the width of the output, which is 768 here, nor
whether the input gets a gradient, which it does here. On a CUDA device the layer also runs in bf16,
by autocast; on a CPU it runs in fp32, on batches of 8. `razor` takes the bits that it would take
for a linear layer in a model.

At each ratio the methods take turns with full; ratios to full are medians over the turns. The
script writes results/linear_DEVICE.json after every turn of a method. The output and the bias
gradient must be those of full, the input gradient too unless its GEMM runs in int8, and the cosine
of the weight gradient to the exact one must reach FLOORS: a run that fails gets no time.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import NormalDist, median

import torch
import torch.nn.functional as F
from pages import MIB, Row
from record import Attempts, run_in_turns, timed
from torch import Tensor, nn

from razorctl import Recipe, restore, sparsify
from razorctl.memory.saved import traced_bytes
from razorctl.ops import kernels

TOKENS, WIDTH = 197, 768
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}  # relative distance of results that round differently
INT8 = 2e-2  # the same, of an input gradient from two int8 copies
# Sparsity -> ms of BackRazor's and PreBackRazor's forward, then of forward and backward, in Tab. 3.
PUBLISHED = {
    0.1: (4.23, 3.14, 9.02, 7.72),
    0.2: (4.35, 4.24, 9.20, 9.03),
    0.3: (4.45, 4.35, 9.34, 9.18),
    0.4: (7.97, 4.45, 16.52, 9.32),
    0.5: (8.94, 7.97, 18.45, 16.51),
}


def _largest(ratio: float) -> float:
    """The share of the energy of normal numbers that is in the largest 1 - ratio of them."""
    normal = NormalDist()
    end = normal.inv_cdf((1 + ratio) / 2)
    return 2 * (end * normal.pdf(end) + normal.cdf(-end))


# Method -> what the cosine of the weight gradient to the exact one must reach at a ratio. Input and
# gradient of the output are normal and independent here, so the cosine of a method that prunes is
# the root of the share of the input's energy that it keeps. That of razor is for 2 bits or more.
FLOORS: dict[str, Callable[[float], float]] = {
    "full": lambda ratio: 0.99999,
    "backrazor": lambda ratio: 0.99 * math.sqrt(_largest(ratio)),
    "prebackrazor-": lambda ratio: 0.97 * math.sqrt(1 - ratio),
    "prebackrazor": lambda ratio: 0.97 * math.sqrt(1 - ratio),
    "razor": lambda ratio: 0.999 if ratio <= 0.8 else 0.9,
    "int8": lambda ratio: 0.999,
}


@dataclass(frozen=True)
class Workload:
    """A layer and its turns. turns: the most that are run; see --seconds. calls: in each turn."""

    batch_size: int
    precisions: tuple[str, ...]
    turns: int
    calls: int
    ratios: tuple[float, ...] = (*(n / 10 for n in range(1, 10)), 0.95)
    tokens: int = TOKENS
    width: int = WIDTH


WORKLOADS = {
    "cuda": Workload(128, ("bf16", "fp32"), turns=7, calls=20),
    "cpu": Workload(8, ("fp32",), turns=5, calls=1),
}
COLUMNS = (  # that are printed, in milliseconds and MiB
    *(("forward_seconds", 1e-3, ".2f"), ("forward_vs_full", 1, ".2f")),
    *(("both_seconds", 1e-3, ".2f"), ("both_vs_full", 1, ".2f")),
    *(("saved_bytes", MIB, ",.2f"), ("weight_gradient_cosine", 1, ".4f")),
)
SMOKE = {"batch_size": 2, "turns": 1, "calls": 1, "ratios": (0.5, 0.95), "width": 512}


@dataclass
class Run(Attempts):
    """A method at a ratio in a precision; forward, both: seconds of passes, one for each turn."""

    method: str
    ratio: float
    precision: str
    forward: list[float] = field(default_factory=list)
    both: list[float] = field(default_factory=list)
    saved: int | None = None
    cosine: float | None = None


class Bench:
    """One layer, one batch and one gradient of its output, which all runs share."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device, self.workload, width = device, workload, workload.width
        self.layer = nn.Linear(width, width, device=device)
        self.x = torch.randn(workload.batch_size, workload.tokens, width, device=device)
        self.dy = torch.randn_like(self.x)

    @contextmanager
    def running(self, run: Run) -> Iterator[Tensor]:
        """The input of a run, while the layer has its method; stock again afterwards."""
        dtype = PRECISIONS[run.precision]
        sparsify(self.layer, Recipe(run.method, run.ratio))
        try:
            yield self.x.to(dtype or torch.float32, copy=True).requires_grad_()
        finally:
            restore(self.layer)

    def forward(self, run: Run, x: Tensor) -> Tensor:
        dtype = PRECISIONS[run.precision]
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            y: Tensor = self.layer(x)
        return y

    def both(self, run: Run, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        """The output, and the gradients of input, weight and bias."""
        y = self.forward(run, x)
        return y, *torch.autograd.grad(y, (x, self.layer.weight, self.layer.bias), dy)

    def check(self, run: Run, exact: list[Tensor]) -> None:
        """Compares a run with full, whose results the first run puts in `exact`."""
        with self.running(run) as x:
            got = [t.detach().float() for t in self.both(run, x, self.dy.to(x.dtype))]
        exact[:] = exact or got
        int8 = INT8 if any(Recipe(run.method, run.ratio).int8) else 0
        least = TOLERANCE[run.precision]
        bounds = {"output": (0, least), "input gradient": (1, max(least, int8))}
        bounds["bias gradient"] = (3, least)
        for name, (which, bound) in bounds.items():
            distance = torch.linalg.vector_norm(got[which] - exact[which])
            if not distance <= bound * torch.linalg.vector_norm(exact[which]):
                raise ArithmeticError(f"the {name} differs from that of full")
        run.cosine = F.cosine_similarity(got[2].flatten(), exact[2].flatten(), dim=0).item()
        floor = FLOORS[run.method](run.ratio)
        if not run.cosine >= floor:
            raise ArithmeticError(f"the weight gradient has cosine {run.cosine:.4f} < {floor:.4f}")

    def measure(self, run: Run) -> None:
        """Notes the bytes kept."""
        with self.running(run) as x:
            run.saved = traced_bytes(self.layer, x, autocast=PRECISIONS[run.precision])

    def time(self, run: Run) -> None:
        """Runs one turn of a run: of each pass a warm-up call, then the timed ones."""
        with self.running(run) as x:
            dy, calls = self.dy.to(x.dtype), self.workload.calls
            forward = timed(lambda: self.forward(run, x), calls, self.device)
            both = timed(lambda: self.both(run, x, dy), calls, self.device)
        if failed := kernels.replaced():  # what was timed is the way around them
            raise RuntimeError(f"kernels failed: {', '.join(op for op, _ in failed)}")
        run.forward.append(forward)
        run.both.append(both)


def groups(bench: Bench) -> list[list[Run]]:
    """For every precision and ratio a run of every method; that of full is the first."""
    return [
        [Run(method, ratio, precision) for method in FLOORS]
        for precision in bench.workload.precisions
        for ratio in bench.workload.ratios
    ]


def as_row(run: Run, group: list[Run]) -> Row:
    """The row of a run in the result; without times if it has failed, or full has."""
    full = group[0]
    row: Row = {key: getattr(run, key) for key in ("method", "ratio", "precision")}
    for name in ("forward", "both"):
        ours, theirs = getattr(run, name), getattr(full, name)
        turns = [a / b for a, b in zip(ours, theirs, strict=False)]  # the last may be cut
        timed = turns and not (run.error or full.error)
        row[f"{name}_seconds"] = median(ours) if timed else None
        row[f"{name}_vs_full"] = median(turns) if timed else None
    row |= {"saved_bytes": run.saved, "weight_gradient_cosine": run.cosine}
    late = None if run.both else "not timed in the seconds given"
    return {**row, "error": run.error or late}


def main() -> None:
    published = {str(ratio): times for ratio, times in PUBLISHED.items()}
    rest = groups, as_row, ("ratio", "method", "precision", "error"), COLUMNS, ("torch",)
    run_in_turns("linear", __doc__, WORKLOADS, SMOKE, Bench, *rest, published_ms=published)


if __name__ == "__main__":
    main()
