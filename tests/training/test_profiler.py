"""Profiles of whole steps: bytes to the byte, times that add up, files that tools can read."""

import itertools
import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from razorctl import Recipe, models, restore, saved_bytes, sparsify
from razorctl.config.job import Job
from razorctl.errors import UsageError
from razorctl.planning import job_trace as tracing
from razorctl.surgery.byte_budget import sparsify_within
from razorctl.system.spans import packing, watched
from razorctl.training import profiler
from razorctl.training.kept_bytes import OTHER
from razorctl.training.profiler import CLASSES, PHASES, Clock, Profile, profile
from tests.models import altered

pytestmark = pytest.mark.usefixtures("shallow")


@cache
def micro(recipe: Recipe | None = None, **options) -> Profile:
    return profile("vit-micro", recipe, **{"batch_size": 4, "steps": 1, "device": "cpu"} | options)


RECIPES = (
    Recipe("full"),
    Recipe("checkpoint"),
    Recipe("backrazor", joint_budget=0.5),
    Recipe("razor", 0.5, joint_budget=0.5, joint="branches"),
    Recipe("razor", 0.5, lora=True, activation_checkpointing=True),
)


@pytest.fixture
def dense() -> Profile:
    return micro(Recipe("full"))


def saved_of(rows) -> dict[str, int]:
    return {row.module: row.saved_bytes for row in rows}


@pytest.mark.parametrize(
    "recipe",
    RECIPES,
    ids=lambda recipe: f"{recipe.method}, {recipe.joint} {recipe.joint_budget:g}",
)
def test_rows_sum_to_what_the_model_saves(recipe, dense):
    result = micro(recipe).result()
    model, x = models.find("vit-micro").bare(10, None), torch.zeros(4, 1, 28, 28)
    full = saved_bytes(model, x)
    sparsify_within(model, recipe, x)
    saved = saved_bytes(model, x)
    assert result["totals"] == {"saved_bytes": saved, "full_saved_bytes": full}
    assert sum(row["saved_bytes"] for row in result["rows"]) == saved
    assert sum(row["full_saved_bytes"] for row in result["rows"]) == full
    assert sum(result["by_kind"].values()) == saved
    assert sum(result["by_kind_full"].values()) == full
    in_full = {r["module"]: r["full_saved_bytes"] for r in result["rows"] if r["full_saved_bytes"]}
    assert in_full == saved_of(dense.rows)
    sampling = result["phases"]["sampling_s"]
    assert (sampling > 0) == (recipe.prunes or recipe.joint_budget < 1)


def test_kinds_are_those_of_the_layers(dense):
    kinds = {row.module: row.kind for row in dense.rows}
    assert kinds["patch_embed.proj"] == "conv"
    assert kinds["blocks.0.attn"] == "attention"
    assert kinds["blocks.0.attn.qkv"] == "linear"
    assert kinds["blocks.0.norm1"] == "norm"
    assert kinds["blocks.0.mlp.act"] == "activation"
    checkpointed = micro(Recipe("checkpoint")).result()
    assert set(checkpointed["by_kind"]) == set(checkpointed["by_kind_full"])
    assert checkpointed["by_kind"][OTHER] > 0
    assert checkpointed["by_kind"]["attention"] == 0


def test_method_and_ratio_change_what_is_pruned_and_not_what_is_dense(dense):
    recipes = Recipe("backrazor", 0.5), Recipe("backrazor"), Recipe("int8")
    totals = [micro(recipe).result()["totals"] for recipe in recipes]
    full = dense.result()["totals"]["full_saved_bytes"]
    assert all(total["full_saved_bytes"] == full for total in totals)
    half, tenth, int8 = (total["saved_bytes"] for total in totals)
    assert half > tenth != int8 < half


def test_keys_are_the_contract():
    recipe = Recipe("backrazor")
    result = json.loads(json.dumps(micro(recipe).result()))
    assert {"totals", "by_kind", "rows", "phases"} <= set(result)
    assert set(result["totals"]) == {"saved_bytes", "full_saved_bytes"}
    assert set(result["rows"][0]) == {"module", "type", "kind", "saved_bytes", "full_saved_bytes"}
    assert set(result["phases"]) == {f"{name}_s" for name in PHASES}
    assert set(result["peak_bytes"]) == {"traced", "measured_allocated", "measured_reserved"}
    assert result["recipe"] == asdict(recipe)
    assert (result["model"], result["batch_size"]) == ("vit-micro", 4)
    assert (result["steps"], result["device"]) == (1, "cpu")


def test_phases_add_up_to_the_step():
    result = micro(Recipe("backrazor"))
    seconds = asdict(result.phases).values()
    assert all(s > 0 for s in seconds)
    assert 0.8 * result.step_s < sum(seconds) <= result.step_s


def test_bytes_are_those_of_a_step_in_its_precision():
    recipe, precision, x = Recipe("backrazor"), "bf16", torch.zeros(4, 1, 28, 28)
    result = micro(recipe, precision=precision)
    assert result.precision == precision
    job = Job("vit-micro", "any", 4, precision=precision, learning_rate=0.1, weight_decay=0)
    assert result.peak_bytes.traced == tracing.trace(job, recipe, CLASSES, "cpu").peak
    model = models.find("vit-micro").bare(CLASSES, None)
    full = saved_bytes(model, x, autocast=torch.bfloat16)
    sparsify(model, recipe)
    saved = saved_bytes(model, x, autocast=torch.bfloat16)
    assert result.result()["totals"] == {"saved_bytes": saved, "full_saved_bytes": full}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_peaks_are_measured_on_cuda(tmp_path):
    result = micro(device="cuda", batch_size=64, snapshot=tmp_path / "snapshot.pickle")
    assert 0 < result.peak_bytes.measured_allocated <= result.peak_bytes.measured_reserved
    assert (tmp_path / "snapshot.pickle").stat().st_size > 0


def test_the_trace_has_the_phases(tmp_path):
    micro(Recipe("backrazor"), trace=tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ranges = Counter(e["name"] for e in events if e.get("cat") == "user_annotation")
    for name in (*PHASES, "step"):
        assert ranges[name] >= 2
    assert ranges["forward"] == 2


REFUSED = {
    "steps": ({"steps": 0}, "steps 0 is not a positive number"),
    "batch": ({"batch_size": 0}, "batch size 0 is not a positive number"),
    "device": ({"device": "warp"}, "try cpu"),
    "snapshot": ({"snapshot": "snapshot.pickle"}, "leave --snapshot out"),
    "trace": ({"trace": "nowhere/trace.json"}, "cannot write nowhere/trace.json"),
    "directory": ({"trace": "."}, "name another file with --trace"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_before_anything_runs(case, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    options, sentence = REFUSED[case]
    monkeypatch.setitem(models.models(), "vit-micro", _unbuildable())
    with pytest.raises(UsageError) as error:
        micro(**options)
    assert sentence in str(error.value)
    assert not list(tmp_path.iterdir())


def _unbuildable() -> models.ModelEntry:
    def bare(*_):
        raise AssertionError("was built")

    odd = altered(models.find("vit-micro"), bare=bare, example=bare)
    return models.ModelEntry.single(odd)


class TestSampling:
    """The spans that count as sampling."""

    @pytest.fixture
    def spans(self):
        """The number of times that a span was entered."""
        entered = []

        @contextmanager
        def span():
            entered.append(True)
            yield

        span.entered = entered
        return span

    def test_the_draw_of_a_joint_budget_counts(self, spans):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        x = torch.randn(3, 8)
        sparsify(model, Recipe("full", joint_budget=0.5))
        with watched(spans):
            model(x)
        assert len(spans.entered) == 2  # and the layer that is drawn packs
        restore(model)
        with watched(spans):
            model(x)
        assert len(spans.entered) == 2  # stock layers choose nothing

    def test_is_taken_out_of_the_forward_pass_once(self, monkeypatch):
        ticks = itertools.count()
        monkeypatch.setattr(
            profiler, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks)))
        )
        clock = Clock(torch.device("cpu"))
        with clock.phase("step"), clock.phase("forward"), watched(clock.sampling):
            with packing(), packing():  # one inside the other, which is the same span
                pass
            with packing():
                pass
        assert clock.seconds == {"step": 7, "forward": 3, "sampling": 2}
        assert next(ticks) == 8  # one look at the beginning and one at the end of each

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    def test_events_on_cuda_time_the_device(self):
        clock, x = Clock(torch.device("cuda")), torch.zeros(2**26, device="cuda")
        x = x * 2 * 2  # memory for two, and the kernel, are there from now on
        with clock.phase("forward"):
            for _ in range(20):
                x = x * 2
            with clock.sampling():
                for _ in range(20):
                    x = x * 2
        seconds = clock.seconds
        assert 0.5 < seconds["sampling"] / seconds["forward"] < 2
