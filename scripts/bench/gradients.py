"""Measures how close the gradient of every method is to the exact one, on pretrained models.

    .venv/bin/python scripts/bench/gradients.py

The script sums the gradient of a fine-tuning loss over the first batches of tasks on real data, in
double precision, with every method at every ratio, and without a method: in fp32, and under bf16
autocast as GPUs train. The exact gradient is always that of `full` in fp32, so the row of `full` in
bf16 says what rounding alone costs. A method whose backward GEMMs run in int8 is also measured with
an int8 forward pass. The script writes results/gradients.json: the cosine and the relative error of
the weight gradients of each layer kind and of the whole gradient, with the bytes that a step
stores; the cosine, relative error and share of differing signs of the worst parameter; and, of
`full` and `razor`, those of AdamW's update after UPDATES steps, whole and worst, to which small
rows count as much as large ones. Dropout is off, so that rounding and pruning are the only
differences. Rows that are not asked for stay, and with --missing those that are there, so that a
call goes on where an earlier one was interrupted. The script needs the `bench` extra and takes an
hour, and seven minutes more where pretrained.py trains first.
"""

import copy
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from passes import parts, undropped, worst
from pretrained import CACHE, TASKS, Rows, Task, loss, take
from record import device_name, head, options, write
from torch import Tensor, nn

from razorctl import Recipe, restore
from razorctl.errors import UsageError
from razorctl.layers.by_type import razor_of
from razorctl.memory.saved import traced_bytes
from razorctl.methods import METHODS
from razorctl.planning.candidates import label
from razorctl.surgery.byte_budget import sparsify_within

RATIOS = (0.5, 0.75, 0.9, 0.95)
MORE = (0.8, 0.85, 0.97, 0.98)  # for byte budgets
BATCHES = 8
BATCH = 16
UPDATES = 20
UPDATED = ("full", "razor")  # methods whose updates are measured
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}


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


class Subject:
    """The model of a task and its batches.

    rows: the rows of the data that the batches are taken from, in order. size: of a batch.
    """

    def __init__(self, task: Task, rows: Rows, cache: Path, batches: int, size: int) -> None:
        torch.manual_seed(0)
        self.name, self.model = task.name, undropped(task.build(cache))
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
        """The bytes that a step on the first batch stores, traced."""
        return traced_bytes(self.model, self.batches[0], autocast=autocast, forward=forward)

    def backward(self, number: int, autocast: torch.dtype | None) -> None:
        """Puts the gradients of a batch into the parameters."""
        inputs, labels = self.batches[number % len(self.batches)]
        torch.manual_seed(number)
        self.model.zero_grad()
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            value = loss(self.model, inputs, labels)
        value.backward()  # type: ignore[no-untyped-call]

    def gradients(self, autocast: torch.dtype | None = None) -> dict[str, Tensor]:
        """Layer kind -> its weight gradients, summed over batches; "all" too.

        autocast: the dtype of a mixed-precision step, None for none.
        """
        named = dict(self.model.named_parameters())
        total = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in named.items()}
        for number in range(len(self.batches)):
            self.backward(number, autocast)
            for name, parameter in named.items():
                if parameter.grad is not None:
                    total[name] = total[name] + parameter.grad.double()
        self.by_name = total
        groups: dict[str, list[Tensor]] = {"all": list(total.values())}
        for name, parameter in named.items():
            if kind := self.kinds.get(id(parameter)):
                groups.setdefault(kind, []).append(total[name])
        return {kind: torch.cat([t.flatten() for t in parts]) for kind, parts in groups.items()}

    def update(self, autocast: torch.dtype | None = None) -> dict[str, Tensor]:
        """Parameter -> what UPDATES steps of AdamW change of it; the model is then as before."""
        start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        state = copy.deepcopy(self.model.state_dict())
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-5, weight_decay=0)
        for number in range(UPDATES):
            self.backward(number, autocast)
            optimizer.step()
        changed = {n: (p.detach() - start[n]).double() for n, p in self.model.named_parameters()}
        self.model.load_state_dict(state)
        return changed


def forward(model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
    """The loss of a batch of a `Subject`."""
    return loss(model, *batch)


def compare(got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """How close the gradient of each layer kind is to the exact one."""
    return {
        kind: {
            "cosine": F.cosine_similarity(got[kind], want, dim=0).item(),
            "relative_error": ((got[kind] - want).norm() / want.norm()).item(),
        }
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


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """The place of a row: by task, precision, method, forward pass, ratio."""
    orders = {"task": TASKS, "precision": PRECISIONS, "method": METHODS}
    at = (list(order).index(row[name]) for name, order in orders.items())
    return *at, row["int8_forward"], row["ratio"] or 0


def measured(
    task: Task, wanted: list[tuple[str, Recipe]], cache: Path, batches: int, size: int
) -> Iterator[dict[str, Any]]:
    """The rows of a task, of these precisions and recipes, but of ratios that it cannot meet."""
    subject = Subject(task, task.load(cache), cache, batches, size)
    exact, each = subject.gradients(), subject.by_name
    updated = any(recipe.method in UPDATED for _, recipe in wanted)
    update = subject.update() if updated else {}
    sizes = {precision: subject.saved(PRECISIONS[precision]) for precision in dict(wanted)}
    for precision, recipe in wanted:
        row, autocast = named(task.name, precision, recipe), PRECISIONS[precision]
        words = f"{task.name} {precision} {label(recipe, 1)}"
        try:
            first = subject.batches[0]
            sparsify_within(subject.model, recipe, first, autocast=autocast, forward=forward)
        except UsageError as error:
            print(f"{words}: {error}", file=sys.stderr)
            continue
        row |= {"saved_bytes": subject.saved(autocast), "full_saved_bytes": sizes[precision]}
        row["closeness"] = compare(subject.gradients(autocast), exact)
        row["worst"] = worst(subject.by_name, each)
        if recipe.method in UPDATED:
            got = subject.update(autocast)
            whole = compare({"all": vector(got)}, {"all": vector(update)})["all"]
            row["update"] = {**whole, "worst": worst(got, update)}
        restore(subject.model)
        print(f"{words}: {row['closeness']['all']['cosine']:.4f}", flush=True)
        yield row


def main() -> None:
    parser = options(__doc__, "gradients")
    for name, every in ("tasks", TASKS), ("methods", METHODS), ("precisions", PRECISIONS):
        parser.add_argument(f"--{name}", nargs="+", choices=list(every), default=list(every))
    parser.add_argument("--missing", action="store_true", help="only rows that the file lacks")
    parser.add_argument("--cache", type=Path, default=CACHE)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    document = json.loads(args.out.read_text()) if args.out.exists() else {}
    document = {"rows": []} | document | head(device_name(), "torch", "timm", "transformers")
    every = {task.name: {"summary": task.summary, **task.length} for task in TASKS.values()}
    document |= {"tasks": every, "batch_size": BATCH, "batches": BATCHES}
    document["command"] = "scripts/bench/gradients.py"
    by_key = {key(row): row for row in document["rows"]}
    for name in args.tasks:
        wanted = [
            (precision, recipe)
            for precision in args.precisions
            for recipe in recipes(precision)
            if recipe.method in args.methods
            and not (args.missing and key(named(name, precision, recipe)) in by_key)
        ]
        if not wanted:
            continue
        if not args.missing:  # a ratio that can no longer be met loses its row
            for precision, recipe in wanted:
                by_key.pop(key(named(name, precision, recipe)), None)
        for row in measured(TASKS[name], wanted, args.cache, BATCHES, BATCH):
            by_key[key(row)] = row
            document["rows"] = [by_key[one] for one in sorted(by_key)]
            write(args.out, document)


if __name__ == "__main__":
    main()
