"""Trains with half of the residual branches, drawn in different ways, to see which way costs least.

    .venv/bin/python scripts/bench/branches.py [--tasks TASK ...] [--ways WAY ...] [--seeds N]

Runs are those of accuracy.py, with the learning rate that is best for `full`; `digits` is vit-micro
on digits, with its defaults. All ways but `full` and `razor` leave half of the branches out of the
backward pass, in the mean over the branches and the run. The script goes on where it was stopped,
and writes results/branches_cpu.json. A run takes one to five minutes of a core.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from accuracy import job_of
from files import EVALUATIONS, TASKS
from machine import device_name
from pages import Row
from pretrained import CACHE
from record import head, options, write
from torch import Tensor

from razorctl import Job, Recipe
from razorctl.sampling.joint import Blocks, Reduce
from razorctl.sampling.samplers import Bandit, Proportional, Sampler
from razorctl.surgery import branches, sparsify
from razorctl.training.run import finetune

BUDGET = 0.5
STEPS = 200  # of digits
RATES = {"digits": None, "r8": 1e-4, "spam": 1e-4, "decoder": 3e-4, "fashion": 3e-5}


def even(size: int, done: float) -> Tensor:
    return torch.full((size,), BUDGET, dtype=torch.float64)


def falling(share: float) -> Callable[[int, float], Tensor]:
    """Probabilities that fall from the first branch to the last; negative: that rise."""

    def probabilities(size: int, done: float) -> Tensor:
        slope = torch.linspace(1, -1, size, dtype=torch.float64)
        return BUDGET * (1 + share * slope)

    return probabilities


def over_time(first: float, last: float) -> Callable[[int, float], Tensor]:
    """A probability for all branches that changes evenly over the run."""
    return lambda size, done: even(size, done) / BUDGET * (first + (last - first) * done)


def phases(first: float, last: float, at: float) -> Callable[[int, float], Tensor]:
    """A probability for all branches that changes once."""
    return lambda size, done: even(size, done) / BUDGET * (first if done < at else last)


@dataclass(frozen=True)
class Way:
    """How branches are drawn.

    probabilities: (branches, share of the run that is done) -> that of each; or what learns them.
    scaled: by 1 / p. rows: whether each row of a batch has draws of its own.
    """

    probabilities: Callable[[int, float], Tensor] | type[Bandit] | type[Proportional] = even
    scaled: bool = False
    rows: bool = False


WAYS = {
    "bandit": Way(Bandit),
    "bandit, scaled": Way(Bandit, scaled=True),
    "proportional to the norms": Way(Proportional),
    "even": Way(),
    "even, scaled": Way(scaled=True),
    "falling by depth": Way(falling(0.96)),
    "falling by depth, less": Way(falling(0.6)),
    "rising by depth": Way(falling(-0.6)),
    "rising by depth, scaled": Way(falling(-0.6), scaled=True),
    "more over time": Way(over_time(0.2, 0.8)),
    "fewer over time": Way(over_time(0.8, 0.2)),
    "all in the last quarter": Way(phases(1 / 3, 1.0, 0.75)),
    "all in the first quarter": Way(phases(1.0, 1 / 3, 0.25)),
    "by row": Way(rows=True),
    "by row, scaled": Way(rows=True, scaled=True),
}


class Drawn(Blocks):
    """A draw by the probabilities of a way."""

    way: Way
    steps: int

    def __init__(self, size: int, budget: float, unbiased: bool, seed: int, *more: Any) -> None:
        super().__init__(size, budget, unbiased, seed, *more)
        learned = self.way.probabilities
        self.sampler = (learned if isinstance(learned, type) else Sampler)(
            size, max(1, round(budget * size))
        )

    def advance(self, reduce: Reduce) -> None:
        if self.way.rows:
            self.drawn = dict.fromkeys(range(self.size), 1.0)
            return
        if not isinstance(self.way.probabilities, type):
            wanted = self.way.probabilities(self.size, self.step / self.steps)
            draw = torch.Generator().manual_seed(self.step)
            total = wanted.sum().item()
            count = int(total + torch.rand((), generator=draw, dtype=torch.float64).item())
            self.sampler.count = max(1, min(self.size, count))
            self.sampler.p = (wanted * (self.sampler.count / total)).clamp(max=1)
        super().advance(reduce)


class ByRow(torch.autograd.Function):
    """x, with a gradient of half of its rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.rows = rows
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy * ctx.rows.view(-1, *[1] * (dy.dim() - 1)), None


def by_row(member: branches.Member, output: Tensor, p: float) -> Tensor:
    """In place of `Member._end`."""
    member.blocks.running(None)
    rows = (torch.randperm(len(output)) % 2).to(output.dtype)
    y: Tensor = ByRow.apply(output, rows / BUDGET if member.blocks.unbiased else rows)
    return y


def run(task: str, way: str, seed: int) -> Row:
    """Fine-tunes a task; a row of the results."""
    rate = RATES[task]
    if task == "digits":
        job = Job("vit-micro", "digits", steps=STEPS, evaluate_every=STEPS // EVALUATIONS)
    else:
        job = replace(job_of(TASKS[task], "fp32", CACHE), learning_rate=rate)
    job = replace(job, seed=seed)
    recipe = Recipe("full" if way == "full" else "razor", seed=seed)
    patches = []
    if way in WAYS:
        one = WAYS[way]
        recipe = replace(recipe, joint_budget=BUDGET, joint="branches", unbiased=one.scaled)
        draw = type("Drawn", (Drawn,), {"way": one, "steps": job.steps})
        patches.append(patch.object(sparsify, "Blocks", draw))
        if one.rows:
            patches.append(patch.object(branches.Member, "_end", by_row))
    for each in patches:
        each.start()
    try:
        with tempfile.TemporaryDirectory() as out:
            going = finetune(job, recipe, out=Path(out) / "run", device="cpu")
            for _ in going:
                pass
            result = going.result()
    finally:
        for each in patches:
            each.stop()
    metric = result["metric"]
    return {
        "task": task,
        "way": way,
        "seed": seed,
        "rate": rate,
        "metric": metric,
        "score": result["metrics"][metric],
        "loss": result["metrics"]["loss"],
        "curve": [(s.step, s.metrics[metric]) for s in going.history if s.metrics is not None],
    }


def main() -> None:
    every = ["full", "razor", *WAYS]
    parser = options(__doc__, "branches_cpu")
    parser.add_argument("--tasks", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--ways", nargs="+", choices=every, default=every)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    done = {(row["task"], row["way"], row["seed"]) for row in rows}
    for task in args.tasks:
        for seed in range(args.seeds):
            for way in args.ways:
                if (task, way, seed) in done:
                    continue
                rows.append(run(task, way, seed))
                document = {
                    **head(device_name(), "torch", "timm"),
                    "command": "scripts/bench/branches.py",
                    "budget": BUDGET,
                    "rows": rows,
                }
                write(args.out, document)
                row = rows[-1]
                print(task, way, seed, f"{row['score']:.4f} {row['loss']:.4f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
