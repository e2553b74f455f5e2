"""Finds the few intervals that best tell the derivatives of GELU and of SiLU.

    .venv/bin/python scripts/bench/derive_buckets.py

The script collects what the activation functions of two pretrained models receive on real data. For
2, 3 and 4 bits it finds the intervals of the least squared error of the derivative, by dynamic
programming over a histogram. It writes razorctl/ops/buckets.json. Both models have GELU. The
intervals of SiLU are for the same inputs, since no pretrained model with SiLU was at hand. The
script needs the `bench` extra and takes two minutes.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from gradients import Subject
from pretrained import CACHE, TASKS, logits
from record import head, options, write
from torch import Tensor

import razorctl
from razorctl.layers.registry import swaps
from razorctl.ops.buckets import BITS

aten = torch.ops.aten
DERIVATIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: aten.gelu_backward(torch.ones_like(x), x),
    "silu": lambda x: aten.silu_backward(torch.ones_like(x), x),
}
REACH, BINS, BATCHES = 8.0, 1024, 2
OUT = Path(razorctl.__file__).parent / "ops" / "buckets.json"


def inputs(cache: Path) -> Tensor:
    """The shares of all activation inputs in equal bins from -REACH to REACH.

    Each task has the same weight.
    """
    total = torch.zeros(BINS, dtype=torch.float64)
    for task in TASKS.values():
        subject = Subject(task, task.load(cache)[0], cache, BATCHES)
        counts = torch.zeros(BINS, dtype=torch.float64)

        def count(module: Any, args: tuple[Tensor], counts: Tensor = counts) -> None:
            x = args[0].detach().float().clamp(-REACH, REACH)
            counts += torch.histc(x, BINS, -REACH, REACH).double()

        for module in subject.model.modules():
            if type(module) in swaps() and swaps()[type(module)].kind == "activation":
                module.register_forward_pre_hook(count)
        with torch.no_grad():
            for x, _ in subject.batches:
                logits(subject.model, x)
        total += counts / counts.sum()
    return total / total.sum()


def cut(weights: Tensor, values: Tensor, count: int) -> tuple[list[int], float]:
    """The first bins of all intervals except the first, and the weighted squared error of all."""
    zero = weights.new_zeros(1)
    mass, first, second = (torch.cat([zero, (weights * values**k).cumsum(0)]) for k in range(3))
    # cost[i, j] of one interval of bins i to j - 1.
    m, f, s = (t[None, :] - t[:, None] for t in (mass, first, second))
    cost = torch.where(m > 0, s - f**2 / m.clamp(min=1e-300), 0).clamp(min=0)
    cost[torch.ones_like(cost).tril().bool()] = torch.inf
    best, choices = cost[0], []
    for _ in range(count - 1):
        total, choice = (best[:, None] + cost).min(0)
        choices.append(choice)
        best = total
    ends, end = [], len(values)
    for choice in reversed(choices):
        end = int(choice[end])
        ends.append(end)
    return ends[::-1], best[len(values)].item()


def stand_in(derivative: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor) -> float:
    """The point of an interval where the derivative is nearest to its mean there."""
    values = derivative(x)
    mean = (values * weights).sum() / weights.sum().clamp(min=1e-300)
    fine = torch.linspace(x[0].item(), x[-1].item(), 10_000, dtype=x.dtype)
    return fine[(derivative(fine) - mean).abs().argmin()].item()


def main() -> None:
    parser = options(__doc__)
    parser.set_defaults(out=OUT)
    parser.add_argument("--cache", type=Path, default=CACHE)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    weights, width = inputs(args.cache), 2 * REACH / BINS
    middles = -REACH + width * (torch.arange(BINS, dtype=torch.float64) + 0.5)
    tables: dict[str, dict[int, Any]] = {}
    for function, derivative in DERIVATIVES.items():
        for bits in BITS:
            ends, error = cut(weights, derivative(middles), 2**bits)
            edges = [0, *ends, BINS]
            stand_ins = [
                stand_in(derivative, middles[a:b], weights[a:b])
                for a, b in itertools.pairwise(edges)
            ]
            tables.setdefault(function, {})[bits] = {
                "ends": [round(-REACH + width * end, 6) for end in ends],
                "stand_ins": [round(x, 4) for x in stand_ins],
                "squared_error": error,
            }
            print(function, bits, f"{error:.2e}", tables[function][bits]["ends"])
    document = {
        **head(None, "torch"),
        "inputs": [task.summary for task in TASKS.values()],
        "tables": tables,
    }
    write(args.out, document)


if __name__ == "__main__":
    main()
