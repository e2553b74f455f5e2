"""Traces the bytes that a training step stores for backward, and its peak; nothing runs.

    .venv/bin/python scripts/bench/memory.py [methods | detectors | papers]

A step is forward, backward and SGD with momentum, on fake tensors; that of the decoder is what
`plan` traces, with its loss. `razor` meets its byte budget on each model, as in `finetune`. For the
methods the script writes results/memory.json, with what `razor` stores on every listed model. For
the detectors among these it writes results/detectors.json, with the losses of their matchers. For
the papers it plans the rows of their tables, in published.toml, for the card of the table, in fp32,
as `razorctl plan --recipe NAME` does, and writes results/papers.json. Each takes ten minutes.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import timm
import torch
from pages import HERE, MIB, RESULTS, Row, listing
from passes import peak_bytes
from record import head, options, write
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.utils._pytree import tree_map
from transformers import BertConfig, BertForSequenceClassification

from razorctl import Job, Recipe, data, models, restore
from razorctl.cli.settings import settings_of_file
from razorctl.config import presets
from razorctl.errors import RazorError, UsageError
from razorctl.memory.fake_mode import TraceMode
from razorctl.memory.saved import traced_bytes
from razorctl.memory.trace_cache import Cache
from razorctl.methods import METHODS
from razorctl.planning import gpus
from razorctl.planning.job_trace import trace
from razorctl.planning.search import Search
from razorctl.surgery.byte_budget import sparsify_within

RATIO = 0.9
BATCH, TOKENS = 8, 128  # of listed models; tokens of a text
OBJECTS = 80  # classes of COCO's objects
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
LIBRARIES = ("torch", "timm", "transformers")
CASES = {
    "full, stored attention": Recipe("full", attention="stored"),
    **{name: Recipe(name, RATIO) for name in METHODS},
    "prebackrazor++, joint budget 0.5": Recipe("prebackrazor++", RATIO, joint_budget=0.5),
    "razor, ratio 0.95": Recipe("razor", 0.95),
    "razor, ratio 0.97": Recipe("razor", 0.97),
    "razor, branches 0.5": Recipe("razor", RATIO, joint_budget=0.5, joint="branches"),
}
FEW = {name: CASES[name] for name in ("full", "backrazor", "int8", "razor")}
ACCUMULATE = 8  # micro-batches
# The network of Back Razor's Tables 2 and 4.
MOBILE = "proxylessnas"
DECODER = "qwen2.5-0.5b"
COLUMNS = (("saved_bytes", MIB, ",.0f"), ("peak_bytes", MIB, ",.0f"))  # that are printed
PREDICTED = ["saved_bytes", "peak_bytes", "step_seconds", "step_seconds_vs_full"]
PREDICTED += ["step_seconds_low", "step_seconds_high"]


def on_images(name: str, batch: int) -> tuple[nn.Module, Any]:
    """A model of timm, or the listed one, and images."""
    with TraceMode():
        images = torch.empty(batch, 3, 224, 224)
    bare = models.find(name).bare if name == MOBILE else None
    return bare(100, None) if bare else timm.create_model(name, num_classes=100), images


def bert() -> tuple[nn.Module, Any]:
    with TraceMode():
        ids = torch.zeros(32, 128, dtype=torch.long)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return BertForSequenceClassification(BertConfig()), inputs


VIT_B, VIT_L = (partial(on_images, f"vit_{size}_patch16_224", 128) for size in ("base", "large"))
# Name -> what builds a model and a batch of it, the precisions, and the cases.
MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], tuple[str, ...], Mapping[str, Recipe]]]
MODELS = {
    "ViT-B/16, 224 px, batch 128": (VIT_B, ("fp32", "bf16"), CASES),
    "BERT-base, 128 tokens, batch 32": (bert, ("fp32",), CASES),
    "ViT-L/16, 224 px, batch 128": (VIT_L, ("fp32",), FEW),
    f"{MOBILE}, 224 px, batch 8": (partial(on_images, MOBILE, 8), ("fp32",), FEW),
}


def shown(items: Any, name: str) -> Any:
    """The items, with a bar of progress."""
    return track(items, name, console=Console(stderr=True))


def steps(name: str) -> Iterator[Row]:
    """The rows of a model: steps whose loss is the sum of the outputs."""
    build, precisions, recipes = MODELS[name]
    model, inputs = build()
    cases: dict[str, tuple[Recipe, bool]] = {case: (r, False) for case, r in recipes.items()}
    if recipes is CASES:
        cases[f"accumulate {ACCUMULATE}"] = Recipe("full"), True
    for case, (recipe, accumulate) in shown(cases.items(), name):
        part = tree_map(lambda t: t[: len(t) // ACCUMULATE], inputs) if accumulate else inputs
        for precision in precisions:
            options = {"autocast": PRECISIONS[precision]}
            sparsify_within(model, recipe, part, **options)
            row = {"model": name, "precision": precision, "case": case}
            row["saved_bytes"] = traced_bytes(model, part, **options)
            row["peak_bytes"] = peak_bytes(model, part, SGD, accumulate=accumulate, **options)
            yield row
            restore(model)


def decoder() -> Iterator[Row]:
    """The rows of a decoder: steps as `plan` traces them, with the loss of its tokens."""
    job = Job(DECODER, "wikitext2", task="causal-lm", batch_size=4, input_size=1024)
    job = replace(job, optimizer="sgd", precision="bf16").resolved({}, None)
    name = f"{DECODER}, 1,024 tokens, batch 4"
    for case in shown(("full", "checkpoint", "int8", "razor", "razor, ratio 0.97"), name):
        step = trace(job, CASES[case], 0)
        row = {"model": name, "precision": job.precision, "case": case}
        yield row | {"saved_bytes": step.saved, "peak_bytes": step.peak}


def listed(detectors: bool = False) -> Iterator[Row]:
    """The bytes that `full` and `razor` keep of every listed model and task, as `plan` traces.

    detectors: whether detection is the task, or all others are.
    """
    every = [(entry, task) for entry in models.models().values() for task in entry.tasks]
    every = [(entry, task) for entry, task in every if (task == "detection") == detectors]
    for entry, task in shown(every, "listed models"):
        size = TOKENS if entry.modality == "text" else None
        # No registered data set has boxes, and a trace reads none.
        dataset = "coco" if detectors else data.usual(task, entry.modality)
        for precision in PRECISIONS:
            job = Job(entry.name, dataset, BATCH, 1, task=task, input_size=size)
            job = replace(job, precision=precision, optimizer="sgd")
            if detectors:
                family, classes = models.find(entry.name, task), OBJECTS
            else:
                family, source = data.pair(job)
                classes = source.classes
            job = job.resolved(family.defaults, None)
            row = {"model": entry.name, "task": task, "precision": precision}
            full = trace(job, Recipe("full"), classes).saved
            try:
                razor = trace(job, CASES["razor"], classes).saved
                yield row | {"full_saved_bytes": full, "saved_bytes": razor, "error": None}
            except UsageError as error:
                yield row | {"full_saved_bytes": full, "saved_bytes": None, "error": str(error)}


def methods() -> Row:
    """The document of memory.json."""
    rows = [row for name in MODELS for row in steps(name)]
    every = {"batch_size": BATCH, "tokens": TOKENS, "rows": list(listed())}
    return {"ratio": RATIO, "rows": [*rows, *decoder()], "listed": every}


def detectors() -> Row:
    """The document of detectors.json."""
    return {"ratio": RATIO, "batch_size": BATCH, "rows": list(listed(detectors=True))}


def of_paper(one: Row, cache: Cache) -> Iterator[Row]:
    """The rows of a table of a paper, and of `razor` at ratio 0.9 with the settings of its first.

    A row has the name in the paper, the preset, the memory, the time and the accuracies.
    """
    ours = ["ours: razor, 90 %", one["rows"][0][1], "", "", *[""] * len(one["data"])]
    for line in (*one["rows"], ours):
        method, name, memory, time, *accuracies = line
        preset = settings_of_file(presets.files("recipes")[name])
        settings = {k: v for k, v in preset.items() if k in Job.__dataclass_fields__}
        recipe = Recipe(**{k: v for k, v in preset.items() if k in Recipe.__dataclass_fields__})
        command = f"razorctl finetune {one['model']} {one['dataset']} --recipe {name}"
        command += " --precision fp32"
        if line is ours:
            recipe, command = Recipe("razor", 0.9), f"{command} --method razor --ratio 0.9"
        row = {"table": one["name"], "method": method, "preset": name, "memory": memory}
        row |= {"time": time, "accuracies": accuracies, "command": command}
        try:
            job = Job(one["model"], one["dataset"], precision="fp32", **settings)
            search = Search(job, gpus.load(one["gpu"]), 1 << 60, recipe, cache)
            predicted = search.predict(recipe).predicted
            yield row | {key: getattr(predicted, key) for key in PREDICTED} | {"error": None}
        except RazorError as error:
            yield row | {"error": str(error)}


def papers() -> Row:
    """The document of papers.json."""
    tables, cache = tomllib.loads((HERE / "published.toml").read_text())["tables"], Cache()
    rows = [row for one in shown(tables, "tables") for row in of_paper(one, cache)]
    return {"tables": [{k: v for k, v in t.items() if k != "rows"} for t in tables], "rows": rows}


PARTS = {
    "methods": (methods, "memory"),
    "detectors": (detectors, "detectors"),
    "papers": (papers, "papers"),
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("part", nargs="?", choices=PARTS, default="methods")
    args = parser.parse_args()
    make, name = PARTS[args.part]
    document = {**head(None, *LIBRARIES), **make()}
    write(args.out or RESULTS / f"{name}.json", document)
    names = ("model", "precision", "case", "table", "method")
    print(listing(document["rows"], names, COLUMNS))


if __name__ == "__main__":
    main()
