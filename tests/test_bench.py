"""The benches: what they refuse to time or to read, how they count, and what they choose."""

import io
import json
import pickle
import sys
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from razorctl import Job, Recipe
from razorctl.memory import trace_cache as traces
from razorctl.planning import gpus
from scripts.bench import linear

CPU = torch.device("cpu")


@pytest.fixture
def bench():
    """Imports a script of scripts/bench; those with data need packages of the `bench` extra."""

    def script(name):
        if name in ("accuracy", "allocate", "gradients", "pretrained"):
            pytest.importorskip("onnx")
        return import_module(name)

    return script


def run(script, monkeypatch, tmp_path, *flags):
    """The result of a script's smoke test."""
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["script", "--smoke", "--out", str(out), *flags])
    script.main()
    return json.loads(out.read_text())


def test_linear_times_every_method(monkeypatch, tmp_path):
    rows = run(linear, monkeypatch, tmp_path, "--device", "cpu")["rows"]
    assert not any(row["error"] for row in rows)
    assert len(rows) == 12
    keys = ("forward_vs_full", "both_seconds", "saved_bytes")
    assert all(row[key] for row in rows for key in keys)


@pytest.mark.parametrize("part", ["products", "phases", "large", "finetune"])
def test_every_part_of_phases_rehearses_on_a_cpu(bench, monkeypatch, tmp_path, part):
    phases = bench("phases")
    for name, few in {"CALLS": 1, "TURNS": 1, "STEPS": 1, "WARM": 1, "PROFILED": 1}.items():
        monkeypatch.setattr(phases, name, few)
    rows = run(phases, monkeypatch, tmp_path, "--device", "cpu", "--part", part)["rows"]
    assert [row["case"] for row in rows] == [*phases.measured(part)]
    assert not any(row["error"] for row in rows)
    if part != "products":
        assert all(row["step_seconds"] > 0 for row in rows)
        return
    failed = {tuple(row["failed"]) for row in rows}
    assert failed == {(), ("cudnn", "efficient")}  # of attention, which has them on a card alone
    ways = {"bf16", "_int_mm alone", "fp8", "fp8, one scale", "razorctl"}
    assert all(row["seconds"].keys() == ways for row in rows if row["case"] in phases.PRODUCTS)


def test_products_are_computed_by_every_way_that_a_card_has(bench, monkeypatch):
    """On fake tensors, with a recorder of launches in place of a card."""
    pytest.importorskip("triton")
    launch, recorded = (import_module(f"razorctl.ops.triton.{n}") for n in ("launch", "recorded"))
    phases, launched = bench("phases"), []
    monkeypatch.setattr(phases, "timed", lambda call, *_: call() is None)
    recorder = launch.Recorder(
        *recorded.Card(90), None, lambda kernel, *_: launched.append(kernel.__name__)
    )
    with FakeTensorMode(), launch.recorded_by(recorder):
        row = phases.product(*phases.PRODUCTS["dW of proj"], torch.device("cuda"), False)
    assert not row["failed"]
    assert {"bf16", "fp8", "_int_mm alone", "cublas"} < row["seconds"].keys()
    assert sum("-split" in way for way in row["seconds"]) == 1
    assert {*launched} == {"scaled_gemm_kernel", "epilogue_kernel"}


def test_the_preset_of_a_card_is_found_by_what_torch_says(bench, monkeypatch):
    card = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=int(79.2 * 2**30))
    card.major, card.minor = 9, 0
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert bench("record").preset() == gpus.load("h100-80gb")


def test_allocations_are_those_of_the_result(bench):
    allocate, load = bench("allocate"), import_module("pages").load
    assert allocate.allocations(load("allocate")) == json.loads(allocate.FILE.read_text())


def test_weights_in_a_pickle_are_arrays_or_nothing(bench):
    with pytest.raises(pickle.UnpicklingError, match="is no array"):
        bench("pretrained").Arrays(io.BytesIO(pickle.dumps(print))).load()


def test_rows_of_accuracy_are_those_of_its_runs(bench):
    """All figures of a result again, from the curves and scores of each seed."""
    accuracy, load = bench("accuracy"), import_module("pages").load
    document = load("accuracy-fashion-cpu-2026-11-23")
    rows = json.loads(json.dumps(accuracy.rows("fashion", document)))
    for row, known in zip(rows, document["rows"], strict=True):
        assert row.pop("seeds") == known.pop("seeds") == [0, 1, 2]
        assert row == pytest.approx(known)
    document["runs"] = [
        run for run in document["runs"] if (run["case"], run["seed"]) != ("lora", 2)
    ]
    assert "lora" not in [row["case"] for row in accuracy.rows("fashion", document)]


def test_gradients_in_bf16_are_compared_with_exact_ones_in_fp32(bench):
    gradients = bench("gradients")

    def build(_):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    rows = {"images": torch.randn(32, 64), "labels": torch.arange(32) % 10}
    task = gradients.Task("tiny", "", build, lambda _: rows, lambda part: part["images"], {})
    wanted = [("fp32", Recipe("full")), ("bf16", Recipe("full")), ("bf16", Recipe("int8"))]
    rows = list(gradients.measured(task, wanted, None, 2, 16))
    exact, rounded, pruned = (row["closeness"]["all"]["cosine"] for row in rows)
    assert exact == pytest.approx(1, abs=1e-12)
    assert 0.95 < pruned < rounded < 1 - 1e-9
    assert [row["precision"] for row in rows] == ["fp32", "bf16", "bf16"]
    assert rows[1]["full_saved_bytes"] < 0.7 * rows[0]["full_saved_bytes"]
    assert rows[0]["update"]["cosine"] == pytest.approx(1, abs=1e-9)
    assert rows[1]["update"]["worst"]["cosine"] <= rows[1]["update"]["cosine"] < 1 - 1e-9
    assert rows[2]["worst"]["cosine"] <= pruned
    assert "update" not in rows[2]


def test_the_worst_parameter_is_a_part_of_a_fused_projection(bench):
    shapes = {"at.qkv.weight": (6, 4), "at.qkv.bias": (6,), "head.weight": (9,)}
    want = {name: torch.ones(shape) for name, shape in shapes.items()}
    got = {name: value.clone() for name, value in want.items()}
    got["at.qkv.weight"][2:4, :2] = -1  # k
    got["at.qkv.bias"][2:4] = -1  # whose exact gradient is zero
    assert bench("passes").worst(got, want) == {
        "parameter": "at.qkv.weight[k]",
        "cosine": pytest.approx(0),
        "relative_error": pytest.approx(2**0.5),
        "signs": pytest.approx(0.5),
    }


def test_a_step_of_razor_launches_and_calls_no_more_than_it_did(bench):
    pytest.importorskip("triton")
    counts = bench("host").counts()
    razor = counts["razor"]
    assert razor["launches"] == sum(razor["by_kernel"].values()) <= 420
    assert razor["op_calls"] <= 300
    assert razor["aten_calls"] < counts["full"]["aten_calls"]
    assert counts["full"]["launches"] == counts["full"]["op_calls"] == 0


@pytest.mark.parametrize(("mib", "batch"), [(640, None), (664, 16), (4096, 1024)])
def test_fits_takes_the_largest_batch_up_to_most(bench, mib, batch):
    card = replace(gpus.load("rtx-4060"), memory_bytes=mib << 20)
    job = Job("vit-micro", "digits", precision="bf16")
    assert bench("fits").fitting(job, card, Recipe("full"), traces.Cache()) == batch
