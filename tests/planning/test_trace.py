"""Traces of jobs' steps, against the steps themselves; to the byte where that can be measured."""

import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from razorctl import models, saved_bytes
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.layers.kinds.linear import Linear
from razorctl.memory import fake
from razorctl.memory.costs import caller
from razorctl.memory.job_forward import JobForward
from razorctl.memory.saved import traced_bytes_by_module
from razorctl.memory.trace_cache import Trace
from razorctl.optimizer import build_optimizer
from razorctl.planning import gpus
from razorctl.planning import job_trace as tracing
from razorctl.planning.times import step_seconds
from razorctl.step import ByLogits, autocast, train_step
from razorctl.surgery.byte_budget import sparsify_within
from razorctl.surgery.freezing import freeze_weights
from scripts.bench import planning
from tests.kept import held_bytes
from tests.layers.test_mlp_tiles import small_tiles
from tests.models import TEXT, entry, registered

JOB = Job("vit", "any", 4, precision="fp32", learning_rate=0.01, weight_decay=0.01, input_size=32)
GRID = [
    # model, method and what goes with it, precision, optimizer, rows, micro-batches, size
    ("vit", "full", "bf16", "adamw", 4, 2, 64),
    ("vit", "checkpoint", "fp32", "adamw", 2, 1, 64),
    ("vit", "prebackrazor++", "bf16", "sgd", 4, 1, 32),
    ("vit", "razor", "fp32", "adamw", 4, 2, 32),
    ("vit", "razor activation_checkpointing", "fp32", "sgd", 4, 1, 32),
    ("vit", "torchao-int8", "fp32", "sgd", 4, 1, 32),
    ("resnet", "razor", "fp32", "adamw", 4, 2, 64),
    ("bert", "checkpoint", "bf16", "sgd", 4, 1, 16),
    ("bert", "backrazor", "fp32", "sgd", 3, 2, 16),
    ("bert", "razor activation_checkpointing", "bf16", "adamw", 2, 1, 16),
    ("bert regression", "razor", "bf16", "adamw", 2, 2, 16),
    ("vit multi-label", "razor", "bf16", "sgd", 4, 1, 32),
    ("bert token-classification", "razor", "bf16", "adamw", 2, 2, 16),
    ("llama causal-lm", "razor", "bf16", "adamw", 4, 1, 160),  # its MLPs in tiles
]


@pytest.mark.parametrize(
    ("name", "method", "precision", "optimizer", "rows", "accumulate", "size"), GRID
)
def test_the_traced_step_is_the_real_one_to_the_byte(
    name, method, precision, optimizer, rows, accumulate, size, small, monkeypatch
):
    tiled = small_tiles(monkeypatch) if name.startswith("llama") else []
    name, task = [*name.split(), "classification"][:2]
    family = models.find(name, task)
    job = replace(
        JOB,
        model=name,
        task=task,
        batch_size=rows * accumulate,
        input_size=size,
        accumulate=accumulate,
        precision=precision,
        optimizer=optimizer,
    )
    method, *others = method.split()
    ratio = 0.9 if name == "llama" else 0.5  # at 0.9 its MLPs are recomputed
    recipe = Recipe(method, ratio, **dict.fromkeys(others, True))
    classes = 1 if task == "regression" else 5
    traced = tracing.trace(job, recipe, classes, "cpu")

    model = family.bare(classes, size)
    inputs, labels = family.batch(model, rows, size, classes)
    whole = JobForward(family, job)
    batch = whole.inputs(model, torch.device("cpu"))
    sparsify_within(model.train(), recipe, batch, **whole.options)
    assert traced.saved == saved_bytes(model, batch, **whole.options)

    def forward():
        with autocast(labels.device, job):
            (whole.forward or family.logits)(model, batch)

    if name != "llama":  # hooks also see what the dropped node of its logits has saved
        assert traced.saved == held_bytes(model, forward)

    updates = build_optimizer(model, job)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    tracker = MemTracker()

    def micro_batches():
        for _ in range(accumulate):
            tracker.reset_mod_stats()
            yield inputs, labels

    def take() -> None:
        total = None if job.of_rows else torch.ones(())
        losses = ByLogits(family.logits, job)
        train_step(model, losses, micro_batches(), updates, job, scaler, total=total)

    take()  # makes the optimizer's state
    tracker.track_external(model, updates, labels, *tree_leaves(inputs))
    with tracker:
        take()
    peak = tracker.get_tracker_snapshot("peak")
    assert traced.peak == sum(device["Total"] for device in peak.values())
    assert bool(tiled) == (name == "llama")
    if tiled:  # a compiled step has none
        assert tracing.trace(replace(job, compile=True), recipe, classes, "cpu").peak > traced.peak


@pytest.mark.parametrize(
    ("name", "others"), [("vit", ["lora"]), ("bert", ["lora", "activation_checkpointing"])], ids=str
)
def test_with_adapters_the_traced_step_saves_what_the_real_one_does(name, others, small):
    job, family = replace(JOB, model=name, optimizer="adamw"), models.find(name)
    recipe = Recipe("razor", 0.5, **dict.fromkeys(others, True))
    traced = tracing.trace(job, recipe, 5, "cpu")
    model = family.bare(5, job.input_size)
    inputs, labels = family.example(model, 4, job.input_size), torch.zeros(4, dtype=torch.long)
    sparsify_within(model.train(), recipe, inputs)
    real = held_bytes(model, lambda: _forward(family, model, inputs, labels, job))
    assert traced.saved == real


@pytest.mark.parametrize("method", ["full", "razor"])
@pytest.mark.parametrize("name", ["vit", "bert"])
def test_frozen_weights_keep_nothing_and_an_average_is_counted(name, method, small):
    """The first block is frozen with what comes before it, and the norms of the second one."""
    job, family = replace(JOB, model=name, optimizer="adamw"), models.find(name)
    recipe = Recipe(method, 0.9)  # a block with dropout in its attention runs again
    model = family.bare(5, job.input_size)
    if method == "full":  # the average knows of no method
        whole = tracing.trace(job, recipe, 5, "cpu")
        averaged = tracing.trace(replace(job, ema=0.9), recipe, 5, "cpu")
        size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        assert (averaged.weights, averaged.saved) == (whole.weights + size, whole.saved)
        assert averaged.peak == whole.peak + size

    inputs, labels = family.example(model, 4, job.input_size), torch.zeros(4, dtype=torch.long)
    for freeze in ("1", {"vit": "*norm*", "bert": "*LayerNorm*"}[name]):
        job = replace(job, freeze=freeze)
        traced = tracing.trace(job, recipe, 5, "cpu")
        model = family.bare(5, job.input_size).train()
        freeze_weights(model, job, recipe.part)
        sparsify_within(model, recipe, inputs)
        real = held_bytes(model, lambda: _forward(family, model, inputs, labels, job))  # noqa: B023
        assert traced.saved == real
        trained = [p.nbytes for p in model.parameters() if p.requires_grad]
        assert traced.optimizer == 2 * sum(trained) + 4 * len(trained)  # each counts its steps
        if freeze == "1":
            parts = traced_bytes_by_module(model, inputs)
            kept = {module for module, size in parts.items() if size}
            first = next(n for n, _ in model.named_modules() if n.endswith((".0", "layer.0")))
            assert kept
            assert not [module for module in kept if module.startswith(first)]


def _forward(family, model, inputs, labels, job):
    with autocast(labels.device, job):
        return family.logits(model, inputs)


STOCK = ("full", "checkpoint", "half")  # whose largest kernels are PyTorch's
# One of each method and attention.
POINTS = {
    (point.recipe.method, point.recipe.attention): point
    for point in planning.grid("cpu")
    if point.job.model == "vit-micro"
}


@pytest.mark.parametrize("key", POINTS, ids=str)
def test_a_step_allocates_what_was_predicted(key, as_on_a_gpu):
    point = POINTS[key]
    if point.recipe.has_byte_budget:  # which is found in one try
        point = replace(point, recipe=replace(point.recipe, ratio=0.5))
    with registered(shallow=True):
        over = planning.row(point, "cpu", None)["over"]
    # What PyTorch's kernels take inside on a CPU is not what they take on CUDA.
    least = -0.05 if point.recipe.method in STOCK else -0.001
    assert least <= over <= (0.05 if point.recipe.method in STOCK else 0.001)


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_evaluation_needs_no_more_than_training(name, small):
    family, job = models.find(name), replace(JOB, model=name)
    traced = tracing.trace(job, Recipe("razor", 0.5), 5, "cpu")
    model = family.bare(5, job.input_size).eval()
    inputs = family.example(model, 4, job.input_size)
    tracker = MemTracker()
    tracker.track_external(model, *tree_leaves(inputs))
    with tracker, torch.no_grad():
        family.logits(model, inputs)
    peak = sum(d["Total"] for d in tracker.get_tracker_snapshot("peak").values())
    assert peak + traced.optimizer <= traced.peak


def test_on_cuda_autocast_has_probabilities_in_single_precision(small):
    job, heads, tokens = replace(JOB, precision="bf16"), 2, 5
    stored, fused = Recipe("full", attention="stored"), Recipe("full")
    here, there = (tracing.trace(job, stored, 5, device).saved for device in ("cpu", "cuda"))
    # Of each of 2 layers, which then keeps them in the precision of the next product too.
    assert there - here == 2 * (4 * heads * tokens * tokens) * 4
    job = replace(job, optimizer="adamw")  # on a card, as there, it is fused
    assert tracing.trace(job, fused, 5, "cpu") == tracing.trace(job, fused, 5, "cuda")


def test_on_cuda_dropout_keeps_bytes_and_fused_attention_none():
    job, width = replace(JOB, model="bert", input_size=16), TEXT["hidden_size"]

    def traced(device: str, method: str = "full", **changes: float) -> Trace:
        with registered(entry("bert", **changes)):
            return tracing.trace(job, Recipe(method), 5, device)

    here, there = traced("cpu", attention_probs_dropout_prob=0.0), traced("cuda")
    masks = 5 * (4 * 16 * width) + 4 * width  # of embeddings, two a layer, and of the classifier
    assert here.saved - there.saved == 3 * masks
    assert here.fused
    assert there.fused
    assert not traced("cpu").fused
    assert traced("cuda", "checkpoint").fused  # whose layers run again in the backward pass
    assert traced("cuda", "prebackrazor++").fused


def test_operations_are_those_of_the_model():
    job = replace(JOB, model="vit-b16", batch_size=2, weight_decay=0.0, input_size=None)
    trace = tracing.trace(job, Recipe("full"), 100)
    # 17.6 G multiplications and as many additions an image forward, twice that backward; the
    # input of the patch embedding needs no gradient. Attention runs its products once more
    # backward, and counts 256 tokens of 197.
    attention, scores = (
        sum(of(kernel) * n for kernel, n in trace.kernels.items() if "attention" in kernel.op)
        for of in (attrgetter("operations"), attrgetter("elements"))
    )
    assert scores == 2 * 12 * 2 * 12 * 256**2
    assert attention == 3.5 * 4 * 64 * scores / 2
    operations = sum(kernel.operations * n for kernel, n in trace.kernels.items()) - attention
    products = 35.1e9 - 12 * 12 * 4 * 64 * 197**2
    assert operations == pytest.approx(2 * 3 * products, rel=0.01)


@cache
def large(recipe: Recipe) -> Trace:
    """The default job in bf16."""
    changes = {"model": "vit-b16", "batch_size": 128, "input_size": None, "weight_decay": 0.0}
    return tracing.trace(replace(JOB, precision="bf16", **changes), recipe, 100)


@pytest.mark.parametrize(("ratio", "share"), [(0.8, 0.35), (0.9, 0.3)])
def test_razor_takes_less_memory_and_time_than_full_on_cards(ratio, share):
    full, razor = large(Recipe("full")), large(Recipe(ratio=ratio))
    assert sum(razor.kernels.values()) <= 1.6 * sum(full.kernels.values())
    assert razor.highest <= share * full.highest
    bounds = {"rtx-3090": (0.7, 0.85), "rtx-4090": (0.65, 0.8), "a100-40gb": (0.75, 0.9)}
    for card, (least, most) in bounds.items():
        likely = (step_seconds(trace, gpus.load(card), graphs=1).likely for trace in (razor, full))
        assert least < next(likely) / next(likely) < most


# Case of phases_cuda.json or step_cuda.json -> recipe, and whether the host replays graphs.
MEASURED = {
    "full": (Recipe("full"), False),
    "full, CUDA graphs": (Recipe("full"), True),
    "full, compiled": (Recipe("full"), False),
    "checkpoint": (Recipe("checkpoint"), False),
    "razor, CUDA graphs": (Recipe("razor", 0.9), True),
    "razor at 0.97, CUDA graphs": (Recipe("razor", 0.97), True),
}


@pytest.mark.parametrize("card", ["h100-80gb", "h200"])
def test_measured_steps_are_within_their_predicted_range(card):
    file = {"h100-80gb": "phases_cuda", "h200": "step_cuda"}[card]
    rows = json.loads(Path(f"scripts/bench/results/{file}.json").read_text())["rows"]
    # Kernels of razorctl have changed since the H200 ran them: an H100 took 55.4 ms for a step.
    since = 46.7 / 55.4 if card == "h200" else 1.0
    compared = 0
    for row in rows:
        if row["case"] in MEASURED and row["step_seconds"] and row.get("precision") != "fp32":
            recipe, graphs = MEASURED[row["case"]]
            trace = large(recipe)
            if row["case"] == "full, compiled":
                trace = replace(trace, kernels=trace.compiled)
            low, _, high = step_seconds(trace, gpus.load(card), int(graphs))
            share = since if recipe.method == "razor" else 1.0
            assert low <= share * row["step_seconds"] <= high, row["case"]
            compared += 1
    assert compared == 5


def test_an_int8_forward_pass_is_counted(small, monkeypatch):
    monkeypatch.setattr(Linear, "SMALLEST", 0)
    job = replace(JOB, batch_size=16, precision="bf16")  # so that no terms are added to sums
    plain, int8 = (
        tracing.trace(job, Recipe(ratio=0.5, int8_forward=forward), 5) for forward in (False, True)
    )

    def operations(trace: Trace, precision: str) -> int:
        return sum(k.operations * n for k, n in trace.kernels.items() if k.precision == precision)

    # Of the three GEMMs of a layer two run in int8 anyway.
    more = operations(int8, "int8") - operations(plain, "int8")
    assert more == operations(plain, "int8") / 2 > 0
    assert operations(plain, "bf16") - operations(int8, "bf16") == more
    assert int8.saved == plain.saved


@pytest.mark.parametrize("method", ["full", "razor"])
def test_calls_are_those_of_a_real_step(method, small):
    job = replace(JOB, accumulate=2)
    recipe, family = Recipe(method, 0.5), models.find("vit")
    traced, one, three = (
        tracing.trace(replace(job, accumulate=n), recipe, 5, "cpu") for n in (2, 1, 3)
    )
    model = family.bare(5, job.input_size)
    rows = family.example(model, 2, job.input_size), torch.zeros(2, dtype=torch.long)
    sparsify_within(model.train(), recipe, rows[0])
    updates = build_optimizer(model, job)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    found: Counter[str | None] = Counter()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found[caller(func)] += 1
            return func(*args, **(kwargs or {}))

    for watch in (nullcontext(), Watch()):  # the first step makes the optimizer's state
        with watch:
            train_step(model, ByLogits(family.logits, job), [rows] * 2, updates, job, scaler)
    assert traced.calls == (found["aten"], found["ops"])
    assert (traced.calls.ops > 0) == (method == "razor")
    # Each further micro-batch calls the same; what follows the last one is the optimizer's.
    assert three.calls.ops - traced.calls.ops == traced.calls.ops - one.calls.ops
    assert 0 < traced.update.aten == one.update.aten == three.update.aten < one.calls.aten / 2
    assert traced.update.ops == 0


def test_copies_of_a_fake_model_share_nothing_with_each_other():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    mode = fake.fake(model)
    first = weight = model[0].weight
    seen = [*model.parameters(), *model.buffers()]
    for _ in range(2):
        with fake.fakes(model, ()) as (same, _), fake.fakes(model, ()):
            assert same is mode
            assert model[2].weight is model[0].weight is not weight
            weight, new = model[0].weight, [*model.parameters(), *model.buffers()]
            assert not {*map(id, seen)} & {*map(id, new)}
            seen += new  # these stay alive
    assert model[0].weight is first
