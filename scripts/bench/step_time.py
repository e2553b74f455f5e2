"""Forward and backward of ViT-S/16 with every method: time against full, and saved bytes.

    .venv/bin/python scripts/bench/step_time.py

Methods take turns in one process; ratios are medians over the turns. Writes
results/step_time.json. No time is reported for a method whose output or classifier bias gradient,
which are exact by contract, differs from full's.
"""

import argparse
import datetime
import json
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median

import timm
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from razorctl import Recipe, saved_bytes, sparsify
from razorctl.recipe import METHODS
from razorctl.views import size

MODEL = "vit_small_patch16_224"
RESULT = Path(__file__).parent / "results" / "step_time.json"


def build(method: str, ratio: float) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(MODEL, num_classes=10).train()
    sparsify(model, Recipe(method, ratio))
    return model


def step(model: nn.Module, x: Tensor) -> tuple[float, Tensor]:
    model.zero_grad()
    start = time.perf_counter()
    y = model(x)
    y.square().mean().backward()
    return time.perf_counter() - start, y.detach()


def exact(model: nn.Module, reference: nn.Module, x: Tensor) -> bool:
    """Whether output and the classifier's bias gradient are the reference's, but for rounding."""
    outputs = [step(m, x)[1] for m in (model, reference)]
    biases = [m.get_parameter("head.bias").grad for m in (model, reference)]
    return torch.allclose(*outputs, atol=1e-5) and torch.allclose(*biases, rtol=1e-4, atol=1e-7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--ratio", type=float, default=0.9)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()

    models = {method: build(method, args.ratio) for method in METHODS}
    x = torch.randn(args.batch_size, 3, 224, 224)
    wrong = [method for method, model in models.items() if not exact(model, models["full"], x)]
    if wrong:
        sys.exit(f"no times reported: {', '.join(wrong)} differ from full where they are exact")
    times: dict[str, list[float]] = {method: [] for method in models}
    for _ in range(args.turns):
        for method, model in models.items():
            times[method].append(step(model, x)[0])
    rows = [
        {
            "method": method,
            "step_time_vs_full": median(
                t / full for t, full in zip(times[method], times["full"], strict=True)
            ),
            "saved_bytes": saved_bytes(model, x),
        }
        for method, model in models.items()
    ]
    document = {
        "command": "scripts/bench/step_time.py",
        "date": datetime.date.today().isoformat(),
        "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {name: version(name) for name in ("razorctl", "torch", "timm")},
        "model": MODEL,
        "batch_size": args.batch_size,
        "ratio": args.ratio,
        "turns": args.turns,
        "rows": rows,
    }
    args.out.write_text(json.dumps(document, indent=2) + "\n")
    table = Table("method", "saved", "step time vs full")
    for row in rows:
        table.add_row(row["method"], size(row["saved_bytes"]), f"{row['step_time_vs_full']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
