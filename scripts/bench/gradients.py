"""Measures how close the gradient of every method is to the exact one, on pretrained models.

    .venv/bin/python scripts/bench/gradients.py

The script sums the gradient of a fine-tuning loss over the first batches of two tasks on real data,
in double precision, with every method at every ratio, and without a method. A method whose backward
GEMMs run in int8 is also measured with an int8 forward pass. The script writes
results/gradients.json: the cosine and the relative error of the weight gradients of each layer
kind, of the gradient of the embedding's output, and of the whole gradient, with the bytes that a
step saves. Dropout is off, so that pruning is the only difference. The script needs the `bench`
extra and takes some fifteen minutes.
"""

import argparse
import itertools
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from pretrained import CACHE, TASKS, Rows, Task, logits, take
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from razorctl import Recipe, restore, saved_bytes, sparsify
from razorctl.cli.views.common import size
from razorctl.errors import UsageError
from razorctl.layers.libraries import razor_of
from razorctl.methods import METHODS
from razorctl.planning.candidates import label

RATIOS = (0.5, 0.75, 0.9, 0.95)
BATCHES = 8
BATCH = 16
EMBEDDINGS = {"fashion": "norm_pre", "r8": "bert.embeddings"}
RESULT = Path(__file__).parent / "results" / "gradients.json"


@dataclass(frozen=True)
class Closeness:
    """How close a vector is to the exact one."""

    cosine: float
    relative_error: float


def recipes() -> list[Recipe]:
    """The recipes of every method that is not exact, at every ratio that it can meet."""
    found = []
    for name, method in METHODS.items():
        if method.approximates:
            ratios = RATIOS if method.ratio != "nothing" else (Recipe.ratio,)
            forwards = (False, True) if method.int8 else (False,)
            for int8_forward, ratio in itertools.product(forwards, ratios):
                with suppress(UsageError):
                    found.append(Recipe(name, ratio, int8_forward=int8_forward))
    return found


class Subject:
    """The model of a task and its batches.

    rows: the rows of the data that the batches are taken from, in order.
    """

    def __init__(self, task: Task, rows: Rows, cache: Path, batches: int) -> None:
        torch.manual_seed(0)
        self.name, self.model = task.name, task.build(cache).train()
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        self.kinds = {
            id(parameter): getattr(razor_of(type(module)), "kind", "other")
            for module in self.model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if name != "bias"
        }
        taken = [take(rows, torch.arange(i * BATCH, (i + 1) * BATCH)) for i in range(batches)]
        self.batches = [(task.inputs(batch), batch["labels"]) for batch in taken]

    def saved(self) -> int:
        """The bytes that a step on the first batch saves, traced."""
        return saved_bytes(self.model, self.batches[0][0])

    def gradients(self) -> dict[str, Tensor]:
        """Layer kind -> its weight gradients, summed over batches; "embedding" and "all" too."""
        at_embedding: list[Tensor] = []
        total: dict[int, Tensor] = {}
        with self._watching(at_embedding.append):
            for number, (inputs, labels) in enumerate(self.batches):
                torch.manual_seed(number)
                self.model.zero_grad()
                F.cross_entropy(logits(self.model, inputs), labels).backward()  # type: ignore[no-untyped-call]
                for parameter in self.model.parameters():
                    grad = parameter.new_zeros(parameter.shape, dtype=torch.float64)
                    grad = grad if parameter.grad is None else parameter.grad.double()
                    known = total.get(id(parameter))
                    total[id(parameter)] = grad if known is None else known + grad
        groups: dict[str, list[Tensor]] = {"embedding": at_embedding, "all": list(total.values())}
        for parameter, kind in self.kinds.items():
            groups.setdefault(kind, []).append(total[parameter])
        return {kind: torch.cat([t.flatten() for t in parts]) for kind, parts in groups.items()}

    @contextmanager
    def _watching(self, tell: Callable[[Tensor], None]) -> Iterator[None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            output.register_hook(lambda grad: tell(grad.double()))

        handle = self.model.get_submodule(EMBEDDINGS[self.name]).register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()


def compare(got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, Closeness]:
    """The closeness of the gradients of each layer kind."""
    return {
        kind: Closeness(
            F.cosine_similarity(got[kind], want, dim=0).item(),
            ((got[kind] - want).norm() / want.norm()).item(),
        )
        for kind, want in exact.items()
    }


def measure(
    subject: Subject, recipe: Recipe, exact: dict[str, Tensor], full: int
) -> dict[str, Any]:
    """A row of the result."""
    sparsify(subject.model, recipe)
    closeness = compare(subject.gradients(), exact)
    saved = subject.saved()
    restore(subject.model)
    return {
        "task": subject.name,
        "method": recipe.method,
        "ratio": recipe.ratio if METHODS[recipe.method].ratio != "nothing" else None,
        "int8_forward": recipe.int8_forward,
        "saved_bytes": saved,
        "full_saved_bytes": full,
        "closeness": {kind: asdict(value) for kind, value in closeness.items()},
    }


def report(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table of cosines."""
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["closeness"]))
    table = Table("task", "method", "ratio", "saved", "of full", *kinds)
    for row in rows:
        cosines = (row["closeness"].get(kind) for kind in kinds)
        table.add_row(
            row["task"],
            row["method"] + (", int8 forward" if row["int8_forward"] else ""),
            "" if row["ratio"] is None else f"{row['ratio']:g}",
            size(row["saved_bytes"]),
            f"{row['saved_bytes'] / row['full_saved_bytes']:.1%}",
            *(
                "" if c is None or math.isnan(c["cosine"]) else f"{c['cosine']:.3f}"
                for c in cosines
            ),
        )
    return table


def describe() -> dict[str, Any]:
    """The settings that all rows of a result have in common."""
    return {
        "date": date.today().isoformat(),
        "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": {name: version(name) for name in ("razorctl", "torch", "timm", "transformers")},
        "tasks": {task.name: {"summary": task.summary, **task.length} for task in TASKS.values()},
        "batch_size": BATCH,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    for name in args.tasks:
        subject = Subject(TASKS[name], TASKS[name].load(args.cache)[0], args.cache, args.batches)
        exact, full = subject.gradients(), subject.saved()
        for recipe in recipes():
            if recipe.method not in args.methods:
                continue
            row = measure(subject, recipe, exact, full)
            rows.append(row)
            document = {
                "command": "scripts/bench/gradients.py",
                **describe(),
                "batches": args.batches,
                "rows": rows,
            }
            args.out.write_text(json.dumps(document, indent=2) + "\n")
            cosine = row["closeness"]["all"]["cosine"]
            print(f"{name} {label(recipe, 1)}: {cosine:.4f}", file=sys.stderr)
    Console().print(report(rows))


if __name__ == "__main__":
    main()
