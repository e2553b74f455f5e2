"""A plan: what it says, its document, its command, and the cache that it is made with."""

import json
import math
import shlex
from dataclasses import replace

import pytest

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.memory.trace_cache import Cache, KernelWork, Trace, dump, load
from razorctl.methods import METHODS
from razorctl.planning import gpus
from razorctl.planning import job_trace as tracing
from razorctl.planning.plan import Plan, plan, read

GIB = 2**30
# Of one ratio of razor, so that few steps are traced.
JOB = Job("vit-micro", "cifar100", batch_size=32768, steps=10, precision="fp32", max_ratio=0.5)


def planned(cache: Cache, gib: float = 4, job: Job = JOB, **options) -> Plan:
    return plan(job, gpus.load("h200"), budget=round(gib * GIB), cache=cache, **options)


def test_exact_ways_stand_beside_the_approximate_one(cache):
    found = planned(cache, prefer="fast")
    assert found.chosen.recipe.method == "razor"
    exact = found.others["exact"]
    assert exact.exact
    assert found.chosen.seconds < exact.seconds
    for method in ("full", "checkpoint"):
        ways = [way for way in found.candidates if way.recipe.method == method]
        assert ways[0].accumulate == 1
    assert any(way.accumulate > 1 and way.fits(found.budget) for way in found.candidates)
    assert all(way.fits(found.budget) for way in found.candidates if way.accumulate > 1)


def test_compiled_full_fine_tuning_is_a_row_that_is_never_chosen(cache):
    found = planned(cache, 40, prefer="exact")
    (row,) = (way for way in found.candidates if way.compiled)
    full = next(way for way in found.candidates if way.label == "full")
    assert (row.label, row.recipe, row.exact) == ("full, compiled", Recipe("full"), True)
    assert row.seconds < full.seconds
    assert row.predicted.step_seconds_vs_full == pytest.approx(row.seconds / full.seconds)
    assert row.predicted.needed_bytes == full.predicted.needed_bytes
    assert found.chosen == full
    found = planned(cache, 40, job=replace(JOB, compile=True))
    assert not any(way.compiled for way in found.candidates)


def test_a_recipe_is_all_that_is_planned(cache):
    recipe = Recipe("prebackrazor++", 0.8)
    found = planned(cache, 2.5, recipe=recipe)
    assert {way.recipe for way in found.candidates} == {recipe}
    assert found.chosen.accumulate > 1
    assert found.others == {}


def test_the_largest_ratio_bounds_the_search(cache):
    found = planned(cache, job=replace(JOB, max_ratio=0.8))
    ratios = {way.recipe.ratio for way in found.candidates if way.recipe.method == "razor"}
    assert ratios
    assert max(ratios) <= 0.8


def test_the_reason_names_the_cosine_of_the_precision(cache):
    found = planned(cache, job=replace(JOB, precision="bf16"), recipe=Recipe(ratio=0.5))
    chosen = replace(found, prefer="balanced", others={"exact": None})
    cosine = METHODS["razor"].cosines["attention"]["narrow"][0.5]
    assert f"in bf16 its gradient has a measured cosine of {cosine:.3f} or more" in chosen.reason
    assert chosen.document()["chosen"]["cosine"] == cosine


def test_the_command_has_every_digit(cache):
    job = replace(JOB, learning_rate=0.0123456789, compile=True, cuda_graphs=True)
    found = planned(cache, 100, job)
    assert "--lr 0.0123456789" in found.command
    assert " --compile --cuda-graphs " in found.command
    assert "compile" not in planned(cache, 100).command


def test_an_int8_forward_pass_is_named_and_in_the_command(cache):
    found = planned(cache, 8, recipe=Recipe(ratio=0.5, int8_forward=True))
    assert found.chosen.label == "razor 0.5, int8 forward"
    assert found.document()["chosen"]["recipe"]["int8_forward"] is True
    assert " --int8-forward" in found.command


def test_the_document_and_the_command_say_the_same(cache, tmp_path):
    found = planned(cache, prefer="exact")
    document = json.loads(json.dumps(found.document()))
    assert document["fits"] is True
    assert document["budget_bytes"] == 4 * GIB
    assert set(document["gpu"]) == {"name", "memory_bytes", "compute_capability", "achieved"}
    keys = {"method", "ratio", "joint_budget", "attention", "precision", "micro_batch"}
    assert keys | {"accumulate", "predicted"} <= set(document["chosen"])
    assert document["chosen"] in document["candidates"]
    predicted = document["chosen"]["predicted"]
    parts = ("weights", "gradients", "optimizer", "transient")
    saved = predicted["peak_bytes"] - sum(predicted[f"{part}_bytes"] for part in parts)
    assert 0 <= saved <= predicted["saved_bytes"]
    full = next(way["predicted"] for way in document["candidates"] if way["label"] == "full")
    assert full["step_seconds_vs_full"] == 1
    for way in (way["predicted"] for way in document["candidates"]):
        share = way["step_seconds"] / full["step_seconds"]
        assert way["step_seconds_vs_full"] == pytest.approx(share)
        assert way["launches"] > 0
        assert way["step_seconds_low"] < way["step_seconds"] < way["step_seconds_high"]
        assert way["step_seconds"] == max(way["card_seconds"], way["host_seconds"])

    file = tmp_path / "p.json"
    file.write_text(json.dumps(document))
    job, recipe, again = read(file)
    assert (job, recipe) == (found.planned_job, found.chosen.recipe)
    assert job.accumulate == found.chosen.accumulate > 1
    assert again == document
    words = shlex.split(found.command)
    assert words[:4] == ["razorctl", "finetune", "vit-micro", "cifar100"]
    assert words[words.index("--batch-size") + 1] == "32768"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d | {"razorctl": "0.0.1"}, r"was planned by razorctl 0\.0\.1; plan again"),
        (lambda d: {"rows": []}, "is not a plan"),
        (lambda d: [1, 2], "is not a plan"),
    ],
)
def test_a_plan_that_is_none(cache, tmp_path, change, message):
    file = tmp_path / "p.json"
    file.write_text(json.dumps(change(planned(cache).document())))
    with pytest.raises(UsageError, match=message):
        read(file)
    file.write_text("{")
    with pytest.raises(UsageError, match="is not a plan"):
        read(file)
    with pytest.raises(UsageError, match="cannot read"):
        read(tmp_path / "none.json")


def test_the_seed_is_that_of_job_and_recipe(cache):
    found = planned(cache, job=replace(JOB, seed=3))
    assert found.planned_recipe.seed == found.planned_job.seed == 3
    assert found.document()["chosen"]["recipe"]["seed"] == 3
    assert found.command.count("--seed 3") == 1


def test_every_step_is_explained(cache):
    found = planned(cache, prefer="fast")
    assert found.steps[0].startswith("full: needs ")
    assert any(step.startswith("checkpoint: ") and "too slow" in step for step in found.steps)
    assert any(step.startswith("razor 0.5: needs ") for step in found.steps)
    assert found.steps[-1] == f"{found.chosen.label}: chosen."


def test_what_is_cached_is_not_traced_again(cache, monkeypatch):
    before = planned(cache)
    monkeypatch.setattr(tracing, "trace", None)
    again = plan(JOB, gpus.load("h200"), budget=4 * GIB, cache=Cache(cache.file.parent))
    assert again == before


def test_a_cache_that_cannot_be_read_or_written_is_none(tmp_path):
    trace = Trace(5, 3, 1, 1, 1, 2, {KernelWork("fp32", 1, 2): 3}, True)
    first = Cache(tmp_path)
    first.put(dump(trace), "a", 1)
    assert load(Cache(tmp_path).get("a", 1)) == trace
    assert Cache(tmp_path).get("a", 2) is None
    second = Cache(tmp_path)
    first.put(2, "b")  # while a second process plans
    second.put(3, "c")
    assert {name: Cache(tmp_path).get(name) for name in "bc"} == {"b": 2, "c": 3}
    first.file.write_text("{")
    assert Cache(tmp_path).facts == {}
    (tmp_path / "file").write_text("")
    nowhere = Cache(tmp_path / "file")
    nowhere.put(1, "a")
    assert nowhere.get("a") == 1


def test_processes_share_a_batch_or_all_that_is_kept(cache):
    both = replace(JOB, batch_size=64, processes=2)
    one = planned(cache, recipe=Recipe("full"), job=replace(JOB, batch_size=32))
    ddp = planned(cache, recipe=Recipe("full"), job=both)
    fsdp = planned(cache, recipe=Recipe("full"), job=replace(both, strategy="fsdp"))
    alone, bucketed, sharded = (p.chosen.predicted for p in (one, ddp, fsdp))
    assert alone.saved_bytes == bucketed.saved_bytes == sharded.saved_bytes
    assert bucketed.weights_bytes == alone.weights_bytes
    # DDP's buckets hold all gradients, also at the peak.
    assert bucketed.gradients_bytes == bucketed.weights_bytes > alone.gradients_bytes
    for part in ("weights", "gradients", "optimizer"):
        whole, share = (getattr(p, f"{part}_bytes") for p in (alone, sharded))
        assert share == math.ceil(whole / 2)
    assert sharded.transient_bytes > alone.transient_bytes  # what is gathered
    assert ddp.command.startswith("torchrun --nproc-per-node 2 -m razorctl finetune")
    assert "--strategy fsdp" in fsdp.command
