"""Fine-tunes with every method: whether a method diverges, and what accuracy it reaches.

    .venv/bin/python scripts/bench/finetuning.py

The script trains an image classifier and a text classifier from pretrained weights. Every case has
the same seeds and the same batches. It writes results/finetuning.json after each case; `--resume`
continues an interrupted call. It needs the `bench` extra. Step seconds tell how long a case takes.
They do not compare methods, because cases do not take turns. The script exits with 1 if a case
diverges: if a loss is not finite, or if the train loss ends above its first value.
"""

import argparse
import itertools
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from pretrained import CACHE, TASKS, TEST_ROWS, Rows, Task, logits, take
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from razorctl import Recipe, saved_bytes, sparsify
from razorctl.cli.views.common import size
from razorctl.methods import METHODS

RATIO = 0.9
CASES = {
    **{method: Recipe(method, RATIO) for method in METHODS},
    "prebackrazor++/flash": Recipe("prebackrazor++", RATIO, attention="flash"),
    "prebackrazor++/joint": Recipe("prebackrazor++", RATIO, joint_budget=0.5),
    "backrazor/mean": Recipe("backrazor", RATIO, mean_correction=True),
    "prebackrazor/mean": Recipe("prebackrazor", RATIO, mean_correction=True),
    "prebackrazor/unbiased": Recipe("prebackrazor", RATIO, unbiased=True),
    "razor/int8-forward": Recipe("razor", RATIO, int8_forward=True),
}
EXACT = ("checkpoint",)  # its gradients are full's, so it is run only when asked for

BATCH = 16
STEPS = 200
TEST_BATCH = 100
WARMUP = 0.1
CLIP_NORM = 1.0
CURVE_EVERY = 10
LAST = 20
RESULT = Path(__file__).parent / "results" / "finetuning.json"


def batches(count: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of row numbers, shuffled in each epoch; they depend on the seed alone."""
    order = torch.Generator().manual_seed(seed)
    while True:
        shuffled = torch.randperm(count, generator=order)
        yield from shuffled[: count // BATCH * BATCH].view(-1, BATCH)


def decay(steps: int, step: int) -> float:
    """The learning rate as a share of its largest: linear warmup, then a cosine to 0."""
    warm = max(1, round(WARMUP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def train(
    task: Task, model: nn.Module, rows: Rows, seed: int, steps: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """The loss and the seconds of every step, up to the first loss that is not finite."""
    optimizer = task.optimizer(model.parameters(), **task.options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(decay, steps))
    losses: list[float] = []
    seconds: list[float] = []
    model.train()
    for index in itertools.islice(batches(len(rows["labels"]), seed), steps):
        start = time.perf_counter()
        batch = take(rows, index, device)
        loss = F.cross_entropy(logits(model, task.inputs(batch)), batch["labels"])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())  # waits for the device, so the time is true
        seconds.append(time.perf_counter() - start)
        if not math.isfinite(losses[-1]):
            break
    return losses, seconds


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, rows: Rows, device: torch.device) -> tuple[float, float]:
    """Accuracy and mean loss on the first test rows."""
    hits = loss = 0.0
    count = min(TEST_ROWS, len(rows["labels"]))
    model.eval()
    for start in range(0, count, TEST_BATCH):
        batch = take(rows, slice(start, min(start + TEST_BATCH, count)), device)
        output = logits(model, task.inputs(batch))
        hits += (output.argmax(1) == batch["labels"]).sum().item()
        loss += F.cross_entropy(output, batch["labels"], reduction="sum").item()
    return hits / count, loss / count


def run(
    task: Task,
    recipe: Recipe,
    seed: int,
    steps: int,
    splits: tuple[Rows, Rows],
    cache: Path,
    device: torch.device,
) -> dict[str, Any]:
    """Trains and tests one case."""
    torch.manual_seed(seed)
    model = task.build(cache).to(device)
    example = task.inputs(take(splits[0], slice(BATCH), device))
    full = saved_bytes(model, example)
    swapped = sparsify(model, replace(recipe, seed=seed))
    saved = saved_bytes(model, example)
    torch.manual_seed(seed)
    losses, seconds = train(task, model, splits[0], seed, steps, device)
    accuracy, test_loss = evaluate(task, model, splits[1], device)
    last = fmean(losses[-LAST:])
    finite = all(map(math.isfinite, losses))
    return {
        "accuracy": accuracy,
        "test_loss": number(test_loss),
        "train_loss": number(last),
        "curve": [number(loss) for loss in losses[::CURVE_EVERY]],
        "finite": finite,
        "diverged": not finite or not math.isfinite(test_loss) or last > losses[0],
        "swapped": len(swapped),
        "saved_bytes": saved,
        "full_saved_bytes": full,
        "step_seconds": median(seconds),
    }


def number(value: float) -> float | None:
    """The value, or None where JSON has no name for it."""
    return value if math.isfinite(value) else None


def settings(task: Task, steps: int) -> dict[str, Any]:
    """All settings of a row of the task, except its case and seed."""
    return {
        "summary": task.summary,
        "packages": [package.name for package in task.packages],
        **task.length,
        "batch_size": BATCH,
        "steps": steps,
        "optimizer": task.optimizer.__name__,
        **task.options,
        "warmup": WARMUP,
        "clip_norm": CLIP_NORM,
        "ratio": RATIO,
        "test_rows": TEST_ROWS,
        "train_loss_over": LAST,
        "curve_every": CURVE_EVERY,
    }


def describe(steps: int, device: torch.device) -> dict[str, Any]:
    """The settings that all rows of a result have in common."""
    cpu = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    packages = [package for task in TASKS.values() for package in task.packages]
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "versions": {name: version(name) for name in ("razorctl", "torch", "timm", "transformers")},
        "settings": {task.name: settings(task, steps) for task in TASKS.values()},
        "sha256": {f: digest for package in packages for f, digest in package.files.items()},
    }


def finished(path: Path, common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier result; exits if it is of other settings."""
    if not path.exists():
        return []
    document: dict[str, Any] = json.loads(path.read_text())
    strange = [key for key, value in common.items() if document[key] != value]
    if strange:
        sys.exit(f"{path} cannot be resumed: it has other {', '.join(strange)}")
    rows: list[dict[str, Any]] = document["rows"]
    return rows


def parse() -> argparse.Namespace:
    """The command line."""
    usual = [case for case in CASES if case not in EXACT]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=usual, metavar="CASE")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    common = describe(args.steps, args.device)
    asked = [word for word in sys.argv[1:] if word != "--resume"]  # which gives the same rows
    rows = finished(args.out, common) if args.resume else []
    done = {(row["task"], row["case"], row["seed"]) for row in rows}
    console = Console()
    for name in args.tasks:
        splits = TASKS[name].load(args.cache)
        for seed, case in itertools.product(range(args.seeds), args.cases):
            if (name, case, seed) in done:
                continue
            measured = run(
                TASKS[name], CASES[case], seed, args.steps, splits, args.cache, args.device
            )
            rows.append({"task": name, "case": case, "seed": seed, **measured})
            document = {
                "command": shlex.join(["scripts/bench/finetuning.py", *asked]),
                "date": date.today().isoformat(),
                **common,
                "rows": rows,
            }
            args.out.write_text(json.dumps(document, indent=2) + "\n")
            console.print(f"{name} {case} {seed}: accuracy {measured['accuracy']:.4f}")

    console.print(report(rows))
    diverged = [f"{row['task']} {row['case']}" for row in rows if row["diverged"]]
    sys.exit(f"diverged: {', '.join(diverged)}" if diverged else 0)


def report(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table."""
    table = Table()
    for heading in ("task", "case"):
        table.add_column(heading)
    for heading in ("seed", "saved", "of full", "accuracy", "test loss", "train loss", "step"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["task"],
            row["case"],
            str(row["seed"]),
            size(row["saved_bytes"]),
            f"{row['saved_bytes'] / row['full_saved_bytes']:.0%}",
            f"{row['accuracy']:.4f}",
            *("none" if row[k] is None else f"{row[k]:.4f}" for k in ("test_loss", "train_loss")),
            f"{row['step_seconds']:.2f} s",
        )
    return table


if __name__ == "__main__":
    main()
