"""Measures how close the gradient of every method is to the exact one, on pretrained models.

    .venv/bin/python scripts/bench/gradients.py

The script sums the gradient of a fine-tuning loss over the first batches of tasks on real data, in
double precision, with every method at every ratio, and without a method: in fp32, and under bf16
autocast as GPUs train. The exact gradient is always that of `full` in fp32, so the row of `full` in
bf16 says what rounding alone costs. A method whose backward GEMMs run in int8 is also measured with
an int8 forward pass. The script writes results/gradients.json: the cosine and the relative error of
the weight gradients of each layer kind, of the gradient of the embedding's output, and of the whole
gradient, with the bytes that a step keeps; the cosine, relative error and share of differing signs
of the worst parameter; and, of `full` and `razor`, those of AdamW's update after UPDATES steps,
whole and worst, to which small rows count as much as large ones. Dropout is off, so that rounding
and pruning are the only differences. Rows of listed models with random weights and random images
stand apart, since their gradients are not those of fine-tuning. Rows that are not asked for stay,
and with --missing those that are there, so that a call goes on where an earlier one was
interrupted. The script needs the `bench` extra and takes an hour, and seven minutes more where
convnets.py and decoder.py train first.
"""

import copy
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
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
from record import head, options, write
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from worst import parts, worst

from razorctl import Recipe, models, restore
from razorctl.errors import UsageError
from razorctl.layers.by_type import razor_of
from razorctl.memory.saved import traced_bytes
from razorctl.methods import METHODS
from razorctl.planning.candidates import label
from razorctl.surgery.byte_budget import sparsify_within
from razorctl.units import size

RATIOS = (0.5, 0.75, 0.9, 0.95)
MORE = (0.8, 0.85, 0.97, 0.98)  # for byte budgets
BATCHES = 8
BATCH = 16
TASKS = {**pretrained.TASKS, **convnets.TASKS, **decoder.TASKS}
# Listed models whose weights no package has: pixels of an image's side.
RANDOM = {"resnet50": 96, "mobilenetv2": 96, "convnext-t": 64, "swin-t": 64, "segformer-b0": 96}
RANDOM_BATCH = 4
RANDOM_BATCHES = 2
UPDATES = 20
UPDATED = ("full", "razor")  # methods whose updates are measured, on tasks of real data
FEW = ("full", "backrazor", "int8", "razor")  # methods on random weights
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Closeness:
    """How close a vector is to the exact one."""

    cosine: float
    relative_error: float


def recipes(precision: str) -> list[Recipe]:
    """The recipes of every method that is not exact, at every ratio that it can meet.

    `full` is not exact either where the precision rounds.
    """
    chosen = [] if PRECISIONS[precision] is None else [Recipe("full")]
    for name, method in METHODS.items():
        if method.prunes:
            ratios = RATIOS if method.ratio != "nothing" else (Recipe.ratio,)
            forwards = (False, True) if method.int8 else (False,)
            every = list(itertools.product(ratios, forwards))
            if method.ratio == "bytes":
                every += [(ratio, False) for ratio in MORE]
            for ratio, int8_forward in every:
                with suppress(UsageError):
                    chosen.append(Recipe(name, ratio, int8_forward=int8_forward))
    return chosen


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
        self.by_name: dict[str, Tensor] = {}  # of the last gradients
        self.batches = [(task.inputs(batch), batch["labels"]) for batch in taken]

    def saved(self, autocast: torch.dtype | None) -> int:
        """The bytes that a step on the first batch keeps, traced."""
        return traced_bytes(self.model, self.batches[0], autocast=autocast, forward=forward)

    def sparsify(self, recipe: Recipe, autocast: torch.dtype | None) -> None:
        """Sparsifies the model so that a step meets a byte budget, as the command line does."""
        sparsify_within(self.model, recipe, self.batches[0], autocast=autocast, forward=forward)

    def gradients(self, autocast: torch.dtype | None = None) -> dict[str, Tensor]:
        """Layer kind -> its weight gradients, summed over batches; "embedding" and "all" too.

        autocast: the dtype of a mixed-precision step, None for none.
        """
        at_embedding: list[Tensor] = []
        total: dict[int, Tensor] = {}
        with self._watching(at_embedding.append):
            for number, (inputs, labels) in enumerate(self.batches):
                torch.manual_seed(number)
                self.model.zero_grad()
                with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                    value = loss(self.model, inputs, labels)
                value.backward()  # type: ignore[no-untyped-call]
                for parameter in self.model.parameters():
                    grad = parameter.new_zeros(parameter.shape, dtype=torch.float64)
                    grad = grad if parameter.grad is None else parameter.grad.double()
                    sum_so_far = total.get(id(parameter))
                    total[id(parameter)] = grad if sum_so_far is None else sum_so_far + grad
        self.by_name = {name: total[id(p)] for name, p in self.model.named_parameters()}
        groups: dict[str, list[Tensor]] = {"all": list(total.values())}
        if self.bottom:
            groups = {"embedding": at_embedding, **groups}
        for parameter, kind in self.kinds.items():
            groups.setdefault(kind, []).append(total[parameter])
        return {kind: torch.cat([t.flatten() for t in parts]) for kind, parts in groups.items()}

    def update(self, autocast: torch.dtype | None = None) -> dict[str, Tensor]:
        """Parameter -> what UPDATES steps of AdamW change of it; the model is then as before."""
        start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        state = copy.deepcopy(self.model.state_dict())
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-5, weight_decay=0)
        for number in range(UPDATES):
            inputs, labels = self.batches[number % len(self.batches)]
            torch.manual_seed(number)
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                value = loss(self.model, inputs, labels)
            optimizer.zero_grad()
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        changed = {n: (p.detach() - start[n]).double() for n, p in self.model.named_parameters()}
        self.model.load_state_dict(state)
        return changed

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


def vector(by_name: dict[str, Tensor]) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([each for _, each in parts(by_name)])


def named(task: str, precision: str, recipe: Recipe) -> dict[str, Any]:
    """The entries of a row that tell it from others."""
    return {
        "task": task,
        "precision": precision,
        "method": recipe.method,
        "ratio": recipe.ratio if METHODS[recipe.method].has_ratio else None,
        "int8_forward": recipe.int8_forward,
    }


def measure(
    subject: Subject,
    recipe: Recipe,
    precision: str,
    exact: dict[str, Tensor],
    full: int,
    each: dict[str, Tensor],
    update: dict[str, Tensor] | None,
) -> dict[str, Any]:
    """A row of the result.

    exact, each, update: the exact gradients by kind and by parameter, and the exact update, None if
    it is not measured.
    """
    autocast = PRECISIONS[precision]
    subject.sparsify(recipe, autocast)
    closeness = compare(subject.gradients(autocast), exact)
    figures: dict[str, Any] = {"worst": worst(subject.by_name, each)}
    if update is not None:
        got = subject.update(autocast)
        whole = compare({"all": vector(got)}, {"all": vector(update)})["all"]
        figures["update"] = {**asdict(whole), "worst": worst(got, update)}
    saved = subject.saved(autocast)
    restore(subject.model)
    return {
        **named(subject.name, precision, recipe),
        "saved_bytes": saved,
        "full_saved_bytes": full,
        "closeness": {kind: asdict(value) for kind, value in closeness.items()},
        **figures,
    }


def report(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table of cosines."""
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["closeness"]))
    table = Table("task", "precision", "method", "ratio", "kept", "of full", *kinds)
    for row in rows:
        cosines = (row["closeness"].get(kind) for kind in kinds)
        table.add_row(
            row["task"],
            row["precision"],
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
        **head(device_name(), "torch", "timm", "transformers"),
        "command": "scripts/bench/gradients.py",
        "tasks": {task.name: {"summary": task.summary, **task.length} for task in TASKS.values()},
        "batch_size": BATCH,
        "batches": BATCHES,
        "random_batch_size": RANDOM_BATCH,
        "random_batches": RANDOM_BATCHES,
    }


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """The place of a row: by task, precision, method, forward pass, ratio."""
    return (
        [*TASKS, *RANDOM].index(row["task"]),
        list(PRECISIONS).index(row["precision"]),
        list(METHODS).index(row["method"]),
        row["int8_forward"],
        row["ratio"] or 0,
    )


def measured(
    task: Task,
    wanted: list[tuple[str, Recipe]],
    cache: Path,
    batches: int,
    size: int,
) -> Iterator[dict[str, Any]]:
    """The rows of a task, of these precisions and recipes.

    A ratio that the model cannot meet has none.
    """
    subject = Subject(task, task.load(cache)[0], cache, batches, size)
    exact, update = subject.gradients(), None
    each = subject.by_name
    if task.name not in RANDOM and any(recipe.method in UPDATED for _, recipe in wanted):
        update = subject.update()
    sizes = {precision: subject.saved(PRECISIONS[precision]) for precision in dict(wanted)}
    for precision, recipe in wanted:
        words = f"{task.name} {precision} {label(recipe, 1)}"
        try:
            known = update if recipe.method in UPDATED else None
            row = measure(subject, recipe, precision, exact, sizes[precision], each, known)
        except UsageError as error:
            print(f"{words}: {error}", file=sys.stderr)
            continue
        print(f"{words}: {row['closeness']['all']['cosine']:.4f}", flush=True)
        yield row


def main() -> None:
    parser = options(__doc__, "gradients")
    every = [*TASKS, *RANDOM]
    parser.add_argument("--tasks", nargs="+", choices=every, default=every, metavar="TASK")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument(
        "--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS)
    )
    parser.add_argument("--missing", action="store_true", help="only rows that the file lacks")
    parser.add_argument("--cache", type=Path, default=CACHE)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    document = json.loads(args.out.read_text()) if args.out.exists() else {}
    document = {"rows": [], "random_rows": []} | document | describe()
    new: list[dict[str, Any]] = []
    for name in args.tasks:
        part = "rows" if name in TASKS else "random_rows"
        by_key = {key(row): row for row in document[part]}
        wanted = [
            (precision, recipe)
            for precision in args.precisions
            for recipe in recipes(precision)
            if recipe.method in args.methods
            and (name in TASKS or recipe.method in FEW)
            and not (args.missing and key(named(name, precision, recipe)) in by_key)
        ]
        if not wanted:
            continue
        if name in TASKS:
            rows = measured(TASKS[name], wanted, args.cache, BATCHES, BATCH)
        else:
            task = random_task(name, RANDOM[name])
            rows = measured(task, wanted, args.cache, RANDOM_BATCHES, RANDOM_BATCH)
        if not args.missing:  # a ratio that can no longer be met loses its row
            for precision, recipe in wanted:
                by_key.pop(key(named(name, precision, recipe)), None)
        for row in rows:
            new.append(row)
            by_key[key(row)] = row
            document[part] = [by_key[one] for one in sorted(by_key)]
            write(args.out, document)
    Console().print(report(new))


if __name__ == "__main__":
    main()
