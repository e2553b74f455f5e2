"""Measures how close the gradient of every method is to the exact one, on pretrained models.

    .venv/bin/python scripts/bench/gradients.py

The script sums the gradient of a fine-tuning loss over the first batches of tasks on real data, in
double precision, with every method at every ratio, and without a method. A method whose backward
GEMMs run in int8 is also measured with an int8 forward pass. The script writes
results/gradients.json: the cosine and the relative error of the weight gradients of each layer
kind, of the gradient of the embedding's output, and of the whole gradient, with the bytes that a
step saves. Dropout is off, so that pruning is the only difference. Rows of listed models with
random weights and random images stand apart, since their gradients are not those of fine-tuning.
With --tasks or --methods the rows that are not asked for stay. The script needs the `bench` extra
and takes some twenty-five minutes, and seven more where convnets.py and decoder.py train first.
"""

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import convnets
import decoder
import pretrained
import torch
import torch.nn.functional as F
import transformers
from machine import device_name
from pretrained import CACHE, Rows, Task, loss, take
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from razorctl import Recipe, models, restore
from razorctl.cli.views.common import size
from razorctl.errors import UsageError
from razorctl.layers.libraries import razor_of
from razorctl.memory.saved import saved_bytes
from razorctl.methods import METHODS
from razorctl.planning.candidates import label
from razorctl.surgery.byte_budget import sparsify_within

RATIOS = (0.5, 0.75, 0.9, 0.95)
BATCHES = 8
BATCH = 16
TASKS = {**pretrained.TASKS, **convnets.TASKS, **decoder.TASKS}
# Listed models whose weights no package has: pixels of an image's side.
RANDOM = {"resnet50": 96, "mobilenetv2": 96, "convnext-t": 64, "swin-t": 64, "segformer-b0": 96}
RANDOM_BATCH = 4
RANDOM_BATCHES = 2
FEW = ("backrazor", "int8", "razor")  # methods on random weights
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
        if method.prunes:
            ratios = RATIOS if method.ratio != "nothing" else (Recipe.ratio,)
            forwards = (False, True) if method.int8 else (False,)
            for int8_forward, ratio in itertools.product(forwards, ratios):
                with suppress(UsageError):
                    found.append(Recipe(name, ratio, int8_forward=int8_forward))
    return found


def random_task(name: str, pixels: int) -> Task:
    """A listed model with random weights, and random images with random classes."""
    model = models.find(name)

    def build(_: Path) -> nn.Module:
        return Logits(model.bare(10, pixels), model.logits)

    def load(_: Path) -> tuple[Rows, Rows]:
        draw = torch.Generator().manual_seed(1)
        count = RANDOM_BATCH * RANDOM_BATCHES
        images = torch.randn(count, 3, pixels, pixels, generator=draw)
        shape = (count, pixels, pixels) if model.task == "segmentation" else (count,)
        rows = {"images": images, "labels": torch.randint(10, shape, generator=draw)}
        return rows, rows

    def inputs(rows: Rows) -> Tensor:
        return rows["images"]

    length = {"pixels": pixels}
    return Task(name, model.summary, (), build, load, inputs, torch.optim.SGD, {}, length, "")


class Logits(nn.Module):
    """A model that returns its logits [..., classes], whatever its library."""

    def __init__(self, model: nn.Module, logits: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.logits = model, logits

    def forward(self, inputs: Any) -> Tensor:
        return self.logits(self.model, inputs).movedim(1, -1)


class Subject:
    """The model of a task and its batches.

    rows: the rows of the data that the batches are taken from, in order. size: of a batch.
    """

    def __init__(self, task: Task, rows: Rows, cache: Path, batches: int, size: int) -> None:
        torch.manual_seed(0)
        self.name, self.model, self.bottom = task.name, task.build(cache).train(), task.embedding
        for module in self.model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
            if hasattr(module, "drop_prob"):
                module.drop_prob = 0.0
        self.kinds = {
            id(parameter): getattr(razor_of(type(module)), "kind", "other")
            for module in self.model.modules()
            for name, parameter in module.named_parameters(recurse=False)
            if name != "bias"
        }
        taken = [take(rows, torch.arange(i * size, (i + 1) * size)) for i in range(batches)]
        self.batches = [(task.inputs(batch), batch["labels"]) for batch in taken]

    def saved(self) -> int:
        """The bytes that a step on the first batch saves, traced."""
        return saved_bytes(self.model, self.batches[0], forward=forward)

    def sparsify(self, recipe: Recipe) -> None:
        """Sparsifies the model so that a step meets a byte budget, as the command line does."""
        sparsify_within(self.model, recipe, self.batches[0], forward=forward)

    def gradients(self) -> dict[str, Tensor]:
        """Layer kind -> its weight gradients, summed over batches; "embedding" and "all" too."""
        at_embedding: list[Tensor] = []
        total: dict[int, Tensor] = {}
        with self._watching(at_embedding.append):
            for number, (inputs, labels) in enumerate(self.batches):
                torch.manual_seed(number)
                self.model.zero_grad()
                loss(self.model, inputs, labels).backward()  # type: ignore[no-untyped-call]
                for parameter in self.model.parameters():
                    grad = parameter.new_zeros(parameter.shape, dtype=torch.float64)
                    grad = grad if parameter.grad is None else parameter.grad.double()
                    known = total.get(id(parameter))
                    total[id(parameter)] = grad if known is None else known + grad
        groups: dict[str, list[Tensor]] = {"all": list(total.values())}
        if self.bottom:
            groups = {"embedding": at_embedding, **groups}
        for parameter, kind in self.kinds.items():
            groups.setdefault(kind, []).append(total[parameter])
        return {kind: torch.cat([t.flatten() for t in parts]) for kind, parts in groups.items()}

    @contextmanager
    def _watching(self, tell: Callable[[Tensor], None]) -> Iterator[None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            output.register_hook(lambda grad: tell(grad.double()))

        if not self.bottom:
            yield
            return
        handle = self.model.get_submodule(self.bottom).register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()


def forward(model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
    """The loss of a batch of a `Subject`."""
    return loss(model, *batch)


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
    subject.sparsify(recipe)
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
        "command": "scripts/bench/gradients.py",
        "date": date.today().isoformat(),
        "device": device_name(),
        "versions": {name: version(name) for name in ("razorctl", "torch", "timm", "transformers")},
        "tasks": {task.name: {"summary": task.summary, **task.length} for task in TASKS.values()},
        "batch_size": BATCH,
        "batches": BATCHES,
        "random_batch_size": RANDOM_BATCH,
        "random_batches": RANDOM_BATCHES,
    }


def measured(
    task: Task, methods: Container[str], cache: Path, batches: int, size: int
) -> Iterator[dict[str, Any]]:
    """The rows of a task; a ratio that the model cannot meet has none."""
    subject = Subject(task, task.load(cache)[0], cache, batches, size)
    exact, full = subject.gradients(), subject.saved()
    for recipe in recipes():
        if recipe.method not in methods:
            continue
        try:
            row = measure(subject, recipe, exact, full)
        except UsageError as error:
            print(f"{task.name} {label(recipe, 1)}: {error}", file=sys.stderr)
            continue
        print(f"{task.name} {label(recipe, 1)}: {row['closeness']['all']['cosine']:.4f}")
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*TASKS, *RANDOM]
    parser.add_argument("--tasks", nargs="+", choices=every, default=every, metavar="TASK")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    rows, random = known.get("rows", []), known.get("random_rows", [])
    for name in args.tasks:
        if name in TASKS:
            found = measured(TASKS[name], args.methods, args.cache, BATCHES, BATCH)
            rows = replaced(rows, name, args.methods, found)
        else:
            methods = [method for method in FEW if method in args.methods]
            task = random_task(name, RANDOM[name])
            found = measured(task, methods, args.cache, RANDOM_BATCHES, RANDOM_BATCH)
            random = replaced(random, name, methods, found)
        document = {**describe(), "rows": rows, "random_rows": random}
        args.out.write_text(json.dumps(document, indent=2) + "\n")
    Console().print(report([*rows, *random]))


def replaced(
    rows: list[dict[str, Any]], task: str, methods: Container[str], found: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The rows with those of a task and methods anew, in the order of tasks and methods."""
    stay = [row for row in rows if row["task"] != task or row["method"] not in methods]
    order, names = [*TASKS, *RANDOM], list(METHODS)
    return sorted(
        [*stay, *found], key=lambda row: (order.index(row["task"]), names.index(row["method"]))
    )


if __name__ == "__main__":
    main()
