"""Plans: what is chosen, what is refused, and that what was traced is what then happens."""

import json
import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._pytree import tree_leaves

from razorctl import data, models, saved_bytes
from razorctl.errors import NoFitError, UsageError
from razorctl.job import Job
from razorctl.memory.trace_cache import Cache, Kernel, Trace, dump, load
from razorctl.methods import METHODS
from razorctl.models import Model, timm, transformers
from razorctl.planning import detect, gpus
from razorctl.planning import job_trace as tracing
from razorctl.planning.candidates import (
    CONTEXT,
    FRAGMENTATION,
    LAUNCH,
    Candidate,
    Predicted,
    seconds,
)
from razorctl.planning.plan import Plan, plan, read
from razorctl.planning.search import ALIKE, Prefer, Search
from razorctl.recipe import Recipe
from razorctl.step import DTYPES, autocast, build_optimizer, train_step
from razorctl.surgery.byte_budget import sparsify_within
from scripts.bench import planning

GIB = 2**30
JOB = Job("vit-micro", "cifar100", batch_size=32768, steps=10, precision="fp32")


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Cache:
    return Cache(tmp_path_factory.mktemp("cache"))


def planned(cache: Cache, gib: float, job: Job = JOB, gpu: str = "h200", **options) -> Plan:
    return plan(job, gpus.load(gpu), budget=round(gib * GIB), cache=cache, **options)


# A plan's trace against a real step.


def small_models(**changes: float) -> dict[str, Model]:
    """By name; `changes` are of BERT's configuration."""
    bert = transformers.BERT_BASE | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 500,
    }
    vit = timm.from_hub("vit", "small", "test_vit.r160_in1k", 16, {})
    text = transformers.from_hub("bert", "small", "nobody/small", bert | changes, {})
    return {"vit": vit, "bert": text, "vit-micro": models.models()["vit-micro"]}


SIZES = {"vit": (32, 64), "bert": (16, 24), "vit-micro": (None, None)}
GRID = [
    (name, method, precision, optimizer, batch, size)
    for name, sizes in SIZES.items()
    for method, precision, optimizer, batch, size in (
        ("full", "fp32", "sgd", 2, sizes[0]),
        ("full", "bf16", "adamw", 4, sizes[1]),
        ("checkpoint", "fp32", "adamw", 2, sizes[1]),
        ("checkpoint", "bf16", "sgd", 4, sizes[0]),
        ("backrazor", "fp32", "sgd", 3, sizes[0]),
        ("prebackrazor++", "fp32", "sgd", 2, sizes[1]),
        ("prebackrazor++", "bf16", "sgd", 4, sizes[0]),
        ("int8", "fp32", "sgd", 4, sizes[0]),
        ("razor", "fp32", "sgd", 2, sizes[1]),
        ("razor", "fp32", "adamw", 4, sizes[0]),
        ("razor", "bf16", "sgd", 2, sizes[0]),
    )
]


@pytest.mark.parametrize(
    ("name", "method", "precision", "optimizer", "batch", "size", "accumulate"),
    [(*point, 1 + i % 2) for i, point in enumerate(GRID)],
)
def test_the_traced_step_is_the_real_one_to_the_byte(
    name, method, precision, optimizer, batch, size, accumulate, monkeypatch
):
    family = small_models()[name]
    monkeypatch.setitem(models.models(), name, replace(family, name=name))
    job = Job(
        name,
        "any",
        batch_size=batch * accumulate,
        input_size=size,
        accumulate=accumulate,
        precision=precision,
        optimizer=optimizer,
        learning_rate=0.01,
        weight_decay=0.01,
    )
    recipe = Recipe(method, 0.8)
    tracing._blueprint.cache_clear()
    traced = tracing.trace(job, recipe, 5, "cpu")

    model = family.bare(5, size)
    inputs, labels = family.example(model, batch, size), torch.zeros(batch, dtype=torch.long)
    sparsify_within(model.train(), recipe, inputs, autocast=DTYPES[precision])
    assert traced.saved == saved_bytes(model, inputs, autocast=DTYPES[precision])
    assert traced.saved == really_saved(model, lambda: _forward(family, model, inputs, labels, job))

    updates = build_optimizer(model, job)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    tracker = MemTracker()
    tracker.track_external(model, labels, *tree_leaves(inputs))

    def micro_batches():
        for _ in range(accumulate):
            tracker.reset_mod_stats()
            yield inputs, labels

    with tracker:
        for _ in range(2):
            train_step(model, family.logits, micro_batches(), updates, job, scaler)
    peak = tracker.get_tracker_snapshot("peak")
    assert traced.peak == sum(device["Total"] for device in peak.values())


def _forward(family, model, inputs, labels, job):
    with autocast(labels.device, job):
        return family.logits(model, inputs)


def really_saved(model, forward) -> int:
    known = (*model.parameters(), *model.buffers())
    held, resident = {}, {t.untyped_storage().data_ptr() for t in known}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in resident:
            held[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(size for size, _ in held.values())


STOCK = ("full", "checkpoint", "half")  # whose largest kernels are PyTorch's
POINTS = [point for point in planning.grid("cpu") if point.job.model == "vit-micro"]


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_a_step_allocates_what_was_predicted(point, as_on_a_gpu):
    over = planning.row(point, "cpu", None)["over"]
    # What PyTorch's kernels take inside on a CPU is not what they take on CUDA.
    assert abs(over) <= (0.05 if point.recipe.method in STOCK else 0.001)


@pytest.mark.parametrize("name", SIZES)
def test_evaluation_needs_no_more_than_training(name, monkeypatch):
    family = small_models()[name]
    monkeypatch.setitem(models.models(), name, replace(family, name=name))
    tracing._blueprint.cache_clear()
    size = SIZES[name][0]
    job = Job(
        name,
        "any",
        batch_size=4,
        precision="fp32",
        learning_rate=0.1,
        weight_decay=0,
        input_size=size,
    )
    traced = tracing.trace(job, Recipe("razor", 0.8), 5, "cpu")
    model = family.bare(5, job.input_size).eval()
    inputs = family.example(model, 4, job.input_size)
    tracker = MemTracker()
    tracker.track_external(model, *tree_leaves(inputs))
    with tracker, torch.no_grad():
        family.logits(model, inputs)
    peak = sum(d["Total"] for d in tracker.get_tracker_snapshot("peak").values())
    assert peak + traced.optimizer <= traced.peak


def test_on_cuda_autocast_has_probabilities_in_single_precision():
    job = Job("vit-b16", "any", 2, precision="bf16", learning_rate=0.1, weight_decay=0)
    stored, fused = Recipe("full", attention="stored"), Recipe("full")
    here, there = (tracing.trace(job, stored, 5, device).saved for device in ("cpu", "cuda"))
    # Of each of 12 layers, which then keeps them in the precision of the next product too.
    assert there - here == 12 * (2 * 12 * 197 * 197) * 4
    assert tracing.trace(job, fused, 5, "cpu") == tracing.trace(job, fused, 5, "cuda")


def test_on_cuda_dropout_keeps_bytes_and_fused_attention_none(monkeypatch):
    def traced(device: str, method: str = "full", **changes: float) -> Trace:
        family = small_models(**changes)["bert"]
        monkeypatch.setitem(models.models(), "bert", replace(family, name="bert"))
        tracing._blueprint.cache_clear()
        job = Job(
            "bert", "any", 4, precision="fp32", learning_rate=0.1, weight_decay=0, input_size=16
        )
        return tracing.trace(job, Recipe(method), 5, device)

    here, there = traced("cpu", attention_probs_dropout_prob=0.0), traced("cuda")
    masks = 5 * (4 * 16 * 64) + 4 * 64  # of the embeddings, two a layer, and of the classifier
    assert here.saved - there.saved == 3 * masks
    assert here.fused
    assert there.fused
    assert not traced("cpu").fused
    assert traced("cuda", "checkpoint").fused  # whose layers run again in the backward pass
    assert traced("cuda", "prebackrazor++").fused


# What is chosen.

PREFERENCES = get_args(Prefer)
WAYS = (Recipe("full"), Recipe("checkpoint"), *(Recipe(ratio=r) for r in (0.5, 0.9, 0.929)))


class Made(Search):
    """A search among made-up ways: of each recipe the bytes and the seconds of a step in one pass.

    overhead: what a micro-batch takes beside its share.
    """

    def __init__(self, budget: int, ways: dict[Recipe, tuple[float, float]], overhead: float):
        self.job = Job("made", "up", batch_size=16, steps=1, precision="bf16")
        self.budget, self.ways, self.overhead = budget, ways, overhead
        self.recipe, self.max_ratio = None, 0.95
        self.looked_at, self.reasons, self._reasons = {}, {}, []

    _exact = WAYS[:2]

    def predict(self, recipe: Recipe, accumulate: int = 1) -> Candidate:
        peak, seconds = self.ways[recipe]
        peak, seconds = GIB + peak / accumulate, seconds + self.overhead * (accumulate - 1)
        reserve = CONTEXT + math.ceil(FRAGMENTATION * peak)
        predicted = Predicted(round(peak), 0, GIB, 0, 0, 0, reserve, seconds)
        return self.looked_at.setdefault(
            (recipe, accumulate), Candidate(recipe, accumulate, predicted)
        )

    def all_that_fit(self, recipes) -> list[Candidate]:
        ways = [self.predict(recipe, count) for recipe in recipes for count in self._counts]
        return [way for way in ways if way.fits(self.budget)]


@st.composite
def made(draw):
    bytes_, seconds = st.floats(0.1 * GIB, 30 * GIB), st.floats(0.5, 2)
    ways = {recipe: (draw(bytes_), draw(seconds)) for recipe in WAYS}
    of_razor = draw(seconds)
    for recipe in WAYS[2:]:
        ways[recipe] = ways[recipe][0], of_razor * draw(st.floats(0.9, 1.1))
    return ways, draw(st.floats(1e-4, 0.1))  # each micro-batch launches kernels of its own


def assert_undominated(chosen: Candidate, ways: Iterable[Candidate]) -> None:
    for way in ways:
        if way.approximation <= chosen.approximation:
            assert way.seconds >= chosen.seconds
            if way.seconds == chosen.seconds:
                assert way.predicted.needed_bytes >= chosen.predicted.needed_bytes


@settings(max_examples=100, deadline=None)
@given(made(), st.lists(st.integers(GIB, 40 * GIB), min_size=2, max_size=6).map(sorted))
@pytest.mark.parametrize("prefer", PREFERENCES)
def test_a_choice_is_the_best_and_more_memory_never_worse(prefer, made, budgets):
    before = math.inf
    for budget in budgets:
        search = Made(budget, *made)
        chosen = search.choose(prefer)
        if chosen is None:
            assert before == math.inf
            allowed = {"exact": WAYS[:2], "balanced": WAYS[:4], "fast": WAYS}[prefer]
            assert not search.all_that_fit(allowed)
            continue
        assert chosen.fits(budget)
        assert chosen.seconds <= before
        before = chosen.seconds
        assert_undominated(chosen, [row for row in search.rows if row.fits(budget)])
        exact = min((way.seconds for way in search.all_that_fit(WAYS[:2])), default=math.inf)
        close = min((way.seconds for way in search.all_that_fit(WAYS[2:4])), default=math.inf)
        if prefer == "fast":
            assert chosen.seconds == min(way.seconds for way in search.all_that_fit(WAYS))
        elif chosen.exact:
            assert chosen.seconds == exact
            assert prefer == "exact" or close > 0.95 * exact
        else:
            assert prefer == "balanced"
            assert chosen.recipe.close
            assert chosen.seconds == close < exact


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_ratios_of_razor_differ_as_little_as_the_search_relies_on(cache, precision):
    search = Search(
        replace(JOB, precision=precision), gpus.load("rtx-4090"), GIB, None, 0.95, cache
    )
    possible = filter(search._possible, search._razor)
    times = [search.predict(recipe).seconds for recipe in possible]
    assert len(times) >= 2
    assert min(times) >= ALIKE * max(times)


def test_close_are_the_ratios_measured_to_be_close():
    results = json.loads(Path("scripts/bench/results/gradients.json").read_text())
    measured: dict[str, dict[float, float]] = {}
    for row in results["rows"]:
        cosines = measured.setdefault(row["method"], {})
        ratio = 1.0 if row["ratio"] is None else row["ratio"]
        cosines[ratio] = min(row["closeness"]["all"]["cosine"], cosines.get(ratio, 1.0))
    for name, method in METHODS.items():
        close = -1.0
        for ratio, cosine in sorted(measured.get(name, {}).items()):
            if cosine < 0.98:
                break
            close = ratio
        assert method.close_up_to == close


def test_exact_ways_stand_beside_the_approximate_one(cache):
    found = planned(cache, 8)
    assert found.chosen.exact
    assert any(way.recipe.method == "razor" for way in found.candidates)
    for method in ("full", "checkpoint"):
        ways = [way for way in found.candidates if way.recipe.method == method]
        assert ways[0].accumulate == 1
    assert any(way.accumulate > 1 and way.fits(found.budget) for way in found.candidates)
    assert all(way.fits(found.budget) for way in found.candidates if way.accumulate > 1)
    assert found.others["exact"] == found.chosen


def test_rows_that_say_the_same_are_one(cache):
    search = Search(JOB, gpus.load("h200"), 80 * GIB, None, 0.95, cache)
    first, same = search.predict(Recipe(ratio=0.5)), search.predict(Recipe(ratio=0.6))
    assert first.predicted == same.predicted
    assert search.rows == (first,)


def test_a_recipe_is_all_that_is_planned(cache):
    recipe = Recipe("prebackrazor++", 0.8)
    found = planned(cache, 8, recipe=recipe)
    assert {way.recipe for way in found.candidates} == {recipe}
    assert found.chosen.accumulate > 1
    assert found.others == {}


def test_the_largest_ratio_bounds_the_search(cache):
    found = planned(cache, 5, max_ratio=0.6)
    ratios = {way.recipe.ratio for way in found.candidates if way.recipe.method == "razor"}
    assert ratios == {0.6}


@pytest.mark.parametrize("prefer", PREFERENCES)
def test_what_does_not_fit_says_what_would(prefer, cache):
    job = replace(JOB, batch_size=2)
    with pytest.raises(NoFitError, match=r"does not fit in 0\.50 GiB; it needs 0\.\d+ GiB") as stop:
        planned(cache, 0.5, job, prefer=prefer)
    assert stop.value.exit_code == 3
    methods = {way["method"] for way in stop.value.document["candidates"]}
    assert methods >= {"full", "checkpoint", "razor", "lora"}
    needed = stop.value.needed
    assert plan(job, gpus.load("h200"), budget=needed, cache=cache, prefer=prefer)
    with pytest.raises(NoFitError):
        plan(job, gpus.load("h200"), budget=needed - 1, cache=cache, prefer=prefer)


def test_the_closest_job_that_fits(cache, monkeypatch):
    monkeypatch.setitem(models.models(), "bert", replace(small_models()["bert"], name="bert"))
    tracing._blueprint.cache_clear()
    job = Job("bert", "rte", batch_size=2, steps=5, precision="fp32", optimizer="adamw")
    with pytest.raises(NoFitError, match="choose a smaller one") as stop:
        planned(cache, 0.6, job)
    less = (stop.value.needed - 1) / GIB
    with pytest.raises(
        NoFitError, match=r"and fits with --precision bf16( and --optimizer sgd)?\."
    ):
        planned(cache, less, job)


def test_the_closest_job_may_be_of_smaller_inputs(cache, monkeypatch):
    monkeypatch.setitem(models.models(), "vit", replace(small_models()["vit"], name="vit"))
    tracing._blueprint.cache_clear()
    job = Job("vit", "cifar100", batch_size=1, input_size=1024, precision="bf16")

    def refusal(budget: int) -> tuple[str, int]:
        return Search(job, gpus.load("h200"), budget, None, 0.95, cache).refusal("exact")

    message, needed = refusal(1)
    assert "choose a smaller one" in message
    said = re.search(r"needs (.*) GiB, and fits with --input-size 768\.", refusal(needed - 1)[0])
    assert 0 <= float(said[1]) - needed / GIB < 0.01
    assert "and fits with --input-size " in refusal(needed - 2**22)[0]


def test_the_closest_may_be_another_way(cache):
    job, gpu = replace(JOB, batch_size=1), gpus.load("h200")
    needed = {p: Search(job, gpu, 1, None, 0.95, cache).needed(p) for p in PREFERENCES}
    assert needed["fast"] <= needed["balanced"] < needed["exact"]
    with pytest.raises(NoFitError, match="and fits with --prefer balanced"):
        plan(job, gpu, budget=needed["balanced"], prefer="exact", cache=cache)
    with pytest.raises(NoFitError, match="and fits with another recipe; leave the settings"):
        plan(job, gpu, Recipe("full"), budget=needed["balanced"], cache=cache)
    adapters = Search(job, gpu, 1, Recipe("lora"), 0.95, cache).needed("exact")
    assert adapters < needed["fast"]
    with pytest.raises(NoFitError, match="and only --method lora fits, which trains adapters"):
        plan(job, gpu, budget=adapters, cache=cache)


# vit-b16 on the cards of the mission.


def test_vit_b16_on_11_gb(cache):
    gpu, budget, _, assumed = detect.target(vram="11GB")
    assert assumed
    assert gpu.name.endswith("RTX 2080 Ti")
    assert "flash" not in gpu.attention
    job = Job("vit-b16", "cifar100", batch_size=128)
    found = plan(job, gpu, budget=budget, cache=cache)
    assert found.job.precision == "fp16"
    assert found.chosen.fits(11 * GIB)


# Time.


def test_seconds_are_the_slower_of_arithmetic_and_memory(cache):
    gpu = gpus.load("rtx-4090")
    found = planned(cache, 80).chosen
    slow = replace(gpu, bandwidth=gpu.bandwidth / 2)
    kernels = {
        Kernel("fp32", 10**12, 8): 2,
        Kernel("bf16", 10**12, 8): 1,
        Kernel("fp32", 0, 10**9): 3,
    }
    trace = Trace(0, 0, 0, 0, 0, 0, kernels, False)
    single, half = (gpu.operations_per_second(precision) for precision in ("fp32", "bf16"))
    moving = 3e9 / gpu.bytes_per_second
    want = 2e12 / single + 1e12 / half + moving + 6 * LAUNCH
    assert seconds(trace, gpu) == pytest.approx(want)
    assert seconds(trace, slow) == pytest.approx(want + moving)
    old = replace(gpu, rates={"fp32": gpu.rates["fp32"]})
    assert seconds(trace, old) == pytest.approx(3e12 / single + moving + 6 * LAUNCH)
    assert found.predicted.step_seconds > 0


def test_operations_are_those_of_the_model():
    job = Job(
        "vit-b16", "cifar100", batch_size=2, precision="fp32", learning_rate=0.1, weight_decay=0
    )
    trace = tracing.trace(job, Recipe("full"), 100)
    operations = sum(kernel.operations * n for kernel, n in trace.kernels.items())
    # 17.6 G multiplications and as many additions an image forward, twice that backward; the
    # input of the patch embedding needs no gradient.
    assert operations == pytest.approx(2 * 3 * 35.1e9, rel=0.02)


# Documents and the cache.


def test_the_command_has_every_digit(cache):
    job = replace(JOB, learning_rate=0.0123456789)
    found = planned(cache, 80, job)
    assert "--lr 0.0123456789" in found.command


def test_the_document_and_the_command_say_the_same(cache, tmp_path):
    found = planned(cache, 8)
    document = json.loads(json.dumps(found.document()))
    assert document["fits"] is True
    assert document["budget_bytes"] == 8 * GIB
    assert set(document["gpu"]) == {"name", "memory_bytes", "compute_capability", "achieved"}
    keys = {"method", "ratio", "joint_budget", "attention", "precision", "micro_batch"}
    assert keys | {"accumulate", "predicted"} <= set(document["chosen"])
    assert document["chosen"] in document["candidates"]
    predicted = document["chosen"]["predicted"]
    parts = ("weights", "gradients", "optimizer", "transient")
    saved = predicted["peak_bytes"] - sum(predicted[f"{part}_bytes"] for part in parts)
    assert 0 <= saved <= predicted["saved_bytes"]

    file = tmp_path / "p.json"
    file.write_text(json.dumps(document))
    job, recipe, again = read(file)
    assert (job, recipe) == (found.planned_job, found.chosen.recipe)
    assert again == document
    words = shlex.split(found.command)
    assert words[:4] == ["razorctl", "finetune", "vit-micro", "cifar100"]
    assert words[words.index("--batch-size") + 1] == "32768"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d | {"budget_bytes": 1}, "was changed after it was planned"),
        (lambda d: d | {"razorctl": "0.0.1"}, r"was planned by razorctl 0\.0\.1; plan again"),
        (lambda d: {"rows": []}, "is no plan"),
        (lambda d: [1, 2], "is no plan"),
    ],
)
def test_a_plan_that_is_none(cache, tmp_path, change, message):
    file = tmp_path / "p.json"
    file.write_text(json.dumps(change(planned(cache, 8).document())))
    with pytest.raises(UsageError, match=message):
        read(file)
    file.write_text("{")
    with pytest.raises(UsageError, match="is no plan"):
        read(file)
    with pytest.raises(UsageError, match="cannot read"):
        read(tmp_path / "none.json")


def test_the_seed_is_that_of_job_and_recipe(cache):
    found = planned(cache, 5, replace(JOB, seed=3))
    assert found.planned_recipe.seed == found.planned_job.seed == 3
    assert found.document()["chosen"]["recipe"]["seed"] == 3
    assert found.command.count("--seed 3") == 1


def test_every_step_is_explained(cache):
    found = planned(cache, 8)
    assert found.steps[0].startswith("full: needs ")
    assert any(step.startswith("razor 0.9: ") and "too slow" in step for step in found.steps)
    assert found.steps[-1] == f"{found.chosen.label}: taken."


def test_what_is_cached_is_not_traced_again(cache, monkeypatch):
    before = planned(cache, 8)
    monkeypatch.setattr(tracing, "trace", None)
    monkeypatch.setattr(data, "pair", None)
    again = plan(JOB, gpus.load("h200"), budget=8 * GIB, cache=Cache(cache.file.parent))
    assert again == before


def test_a_cache_that_cannot_be_read_or_written_is_none(tmp_path):
    trace = Trace(5, 3, 1, 1, 1, 2, {Kernel("fp32", 1, 2): 3}, True)
    first = Cache(tmp_path)
    first.put(dump(trace), "a", 1)
    assert load(Cache(tmp_path).get("a", 1)) == trace
    assert Cache(tmp_path).get("a", 2) is None
    first.file.write_text("{")
    assert Cache(tmp_path).facts == {}
    (tmp_path / "file").write_text("")
    nowhere = Cache(tmp_path / "file")
    nowhere.put(1, "a")
    assert nowhere.get("a") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefer": "quick"}, "unknown preference 'quick'"),
        ({"max_ratio": 1.0}, r"largest ratio 1.0 is outside \[0, 1\)"),
        ({"job": replace(JOB, batch_size=60_000)}, "larger than the 50000 training examples"),
        ({"job": replace(JOB, model="bert-base")}, "bert-base takes texts"),
    ],
)
def test_bad_requests(cache, options, message):
    with pytest.raises(UsageError, match=message):
        planned(cache, 8, **options)
