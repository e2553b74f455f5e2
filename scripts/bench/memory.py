"""Traces the saved bytes and the peak of a training step with every method; nothing runs.

    .venv/bin/python scripts/bench/memory.py

A step is forward, backward and SGD with momentum, on fake tensors. The script writes
results/memory.json.
"""

import argparse
import datetime
import json
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map
from transformers import BertConfig, BertForSequenceClassification

from razorctl import Recipe, restore, saved_bytes, sparsify
from razorctl.cli.views.common import size
from razorctl.memory.tracker import peak_bytes
from razorctl.methods import METHODS

RATIO = 0.9
RESULT = Path(__file__).parent / "results" / "memory.json"
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
CASES = {
    "full, stored attention": Recipe("full", attention="stored"),
    **{name: Recipe(name, RATIO) for name in METHODS},
    "prebackrazor++, joint budget 0.5": Recipe("prebackrazor++", RATIO, joint_budget=0.5),
    "razor, branches 0.5": Recipe("razor", RATIO, joint_budget=0.5, joint="branches"),
}
ACCUMULATE = 8  # micro-batches


def vit() -> tuple[nn.Module, Any]:
    with FakeTensorMode():
        images = torch.empty(128, 3, 224, 224)
    return timm.create_model("vit_base_patch16_224", num_classes=100), images


def bert() -> tuple[nn.Module, Any]:
    with FakeTensorMode():
        ids = torch.zeros(32, 128, dtype=torch.long)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return BertForSequenceClassification(BertConfig()), inputs


MODELS = {
    "ViT-B/16, 224 px, batch 128": (vit, ("fp32", "bf16")),
    "BERT-base, 128 tokens, batch 32": (bert, ("fp32",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    rows = []
    for name, (build, precisions) in MODELS.items():
        model, inputs = build()
        cases: dict[str, tuple[Recipe, bool]] = {case: (r, False) for case, r in CASES.items()}
        cases[f"accumulate {ACCUMULATE}"] = Recipe("full"), True
        for case, (recipe, accumulate) in track(cases.items(), name, console=Console(stderr=True)):
            sparsify(model, recipe)
            part = tree_map(lambda t: t[: len(t) // ACCUMULATE], inputs) if accumulate else inputs
            for precision in precisions:
                options = {"autocast": PRECISIONS[precision]}
                row = {"model": name, "precision": precision, "case": case}
                row["saved_bytes"] = saved_bytes(model, part, **options)
                row["peak_bytes"] = peak_bytes(model, part, SGD, accumulate=accumulate, **options)
                rows.append(row)
            restore(model)
    document = {
        "command": "scripts/bench/memory.py",
        "date": datetime.date.today().isoformat(),
        "versions": {n: version(n) for n in ("razorctl", "torch", "timm", "transformers")},
        "ratio": RATIO,
        "rows": rows,
    }
    args.out.write_text(json.dumps(document, indent=2) + "\n")
    table = Table("model", "precision", "case", "saved", "peak")
    for row in rows:
        sizes = (size(row[key]) for key in ("saved_bytes", "peak_bytes"))
        table.add_row(row["model"], row["precision"], row["case"], *sizes)
    Console().print(table)


if __name__ == "__main__":
    main()
