"""Traces the kept bytes and the peak of a training step with every method; nothing runs.

    .venv/bin/python scripts/bench/memory.py

A step is forward, backward and SGD with momentum, on fake tensors; that of the decoder is what
`plan` traces, with its loss. `razor` meets its byte budget on each model, as in `finetune`. The
script writes results/memory.json, with what `razor` keeps on every listed model, and takes some ten
minutes.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import timm
import torch
from peaks import peak_bytes
from record import head, options, write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.utils._pytree import tree_map
from transformers import BertConfig, BertForSequenceClassification

from razorctl import Job, Recipe, data, models, restore
from razorctl.errors import UsageError
from razorctl.memory.fake_mode import TraceMode
from razorctl.memory.saved import traced_bytes
from razorctl.methods import METHODS
from razorctl.planning.job_trace import trace
from razorctl.surgery.byte_budget import sparsify_within
from razorctl.units import size

RATIO = 0.9
BATCH, TOKENS = 8, 128  # of listed models; tokens of a text
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
CASES = {
    "full, stored attention": Recipe("full", attention="stored"),
    **{name: Recipe(name, RATIO) for name in METHODS},
    "prebackrazor++, joint budget 0.5": Recipe("prebackrazor++", RATIO, joint_budget=0.5),
    "razor, ratio 0.95": Recipe("razor", 0.95),
    "razor, ratio 0.97": Recipe("razor", 0.97),
    "razor, branches 0.5": Recipe("razor", RATIO, joint_budget=0.5, joint="branches"),
}
ACCUMULATE = 8  # micro-batches


FEW = {name: CASES[name] for name in ("full", "backrazor", "int8", "razor")}
# The network of Back Razor's Tables 2 and 4.
MOBILE = "proxylessnas"
DECODER = "qwen2.5-0.5b"


@dataclass(frozen=True)
class Traced:
    """A model and a batch of it, in some precisions and cases."""

    build: Callable[[], tuple[nn.Module, Any]]
    precisions: tuple[str, ...] = ("fp32",)
    cases: Mapping[str, Recipe] = field(default_factory=lambda: FEW)
    accumulate: bool = False


def timm_model(name: str, batch: int) -> tuple[nn.Module, Any]:
    with TraceMode():
        images = torch.empty(batch, 3, 224, 224)
    return timm.create_model(name, num_classes=100), images


def mobile() -> tuple[nn.Module, Any]:
    with TraceMode():
        images = torch.empty(8, 3, 224, 224)
    return models.find(MOBILE).bare(100, None), images


def bert() -> tuple[nn.Module, Any]:
    with TraceMode():
        ids = torch.zeros(32, 128, dtype=torch.long)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return BertForSequenceClassification(BertConfig()), inputs


MODELS = {
    "ViT-B/16, 224 px, batch 128": Traced(
        partial(timm_model, "vit_base_patch16_224", 128), ("fp32", "bf16"), CASES, True
    ),
    "BERT-base, 128 tokens, batch 32": Traced(bert, cases=CASES, accumulate=True),
    "ViT-L/16, 224 px, batch 128": Traced(partial(timm_model, "vit_large_patch16_224", 128)),
    f"{MOBILE}, 224 px, batch 8": Traced(mobile),
}


def steps(name: str, traced: Traced) -> Iterator[dict[str, Any]]:
    """The rows of a model: steps whose loss is the sum of the outputs."""
    model, inputs = traced.build()
    cases: dict[str, tuple[Recipe, bool]] = {case: (r, False) for case, r in traced.cases.items()}
    if traced.accumulate:
        cases[f"accumulate {ACCUMULATE}"] = Recipe("full"), True
    for case, (recipe, accumulate) in track(cases.items(), name, console=Console(stderr=True)):
        part = tree_map(lambda t: t[: len(t) // ACCUMULATE], inputs) if accumulate else inputs
        for precision in traced.precisions:
            options = {"autocast": PRECISIONS[precision]}
            sparsify_within(model, recipe, part, **options)
            row = {"model": name, "precision": precision, "case": case}
            row["saved_bytes"] = traced_bytes(model, part, **options)
            row["peak_bytes"] = peak_bytes(model, part, SGD, accumulate=accumulate, **options)
            yield row
            restore(model)


def decoder() -> Iterator[dict[str, Any]]:
    """The rows of a decoder: steps as `plan` traces them, with the loss of its tokens."""
    job = Job(
        DECODER,
        "wikitext2",
        task="causal-lm",
        batch_size=4,
        input_size=1024,
        optimizer="sgd",
        precision="bf16",
    ).resolved({}, None)
    name = f"{DECODER}, 1,024 tokens, batch 4"
    for case in track(
        ("full", "checkpoint", "int8", "razor", "razor, ratio 0.97"),
        name,
        console=Console(stderr=True),
    ):
        step = trace(job, CASES[case], 0)
        row = {"model": name, "precision": job.precision, "case": case}
        yield row | {"saved_bytes": step.saved, "peak_bytes": step.peak}


def listed() -> Iterator[dict[str, Any]]:
    """The bytes that `full` and `razor` keep of every listed model and task, as `plan` traces."""
    every = [(entry, task) for entry in models.models().values() for task in entry.tasks]
    for entry, task in track(every, "listed models", console=Console(stderr=True)):
        size = TOKENS if entry.modality == "text" else None
        dataset = data.usual(task, entry.modality)
        for precision in PRECISIONS:
            job = Job(entry.name, dataset, BATCH, 1, task=task, input_size=size)
            job = replace(job, precision=precision, optimizer="sgd")
            family, source = data.pair(job)
            job = job.resolved(family.defaults, None)
            row = {"model": entry.name, "task": task, "precision": precision}
            full = trace(job, Recipe("full"), source.classes).saved
            try:
                razor = trace(job, CASES["razor"], source.classes).saved
                yield row | {"full_saved_bytes": full, "saved_bytes": razor, "error": None}
            except UsageError as error:
                yield row | {"full_saved_bytes": full, "saved_bytes": None, "error": str(error)}


def main() -> None:
    args = options(__doc__, "memory").parse_args()
    rows = [row for name, traced in MODELS.items() for row in steps(name, traced)]
    rows += decoder()
    document = {
        **head(None, "torch", "timm", "transformers"),
        "ratio": RATIO,
        "rows": rows,
        "listed": {"batch_size": BATCH, "tokens": TOKENS, "rows": list(listed())},
    }
    write(args.out, document)
    table = Table("model", "precision", "case", "kept", "peak")
    for row in rows:
        sizes = (size(row[key]) for key in ("saved_bytes", "peak_bytes"))
        table.add_row(row["model"], row["precision"], row["case"], *sizes)
    Console().print(table)


if __name__ == "__main__":
    main()
