"""The benches: what they refuse to time or to read, how they count, and what they choose."""

import io
import json
import math
import pickle
import sys
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from razorctl import Job, Recipe
from razorctl.layers.kinds.linear import Linear
from razorctl.memory import trace_cache as traces
from razorctl.planning import gpus
from scripts.bench import linear, planning

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


def test_linear_gives_no_time_to_a_wrong_output(monkeypatch):
    forward = Linear.forward
    monkeypatch.setattr(Linear, "forward", lambda self, x: 1.001 * forward(self, x))
    small = {"batch_size": 1, "tokens": 9, "width": 64}
    bench = linear.Bench(replace(linear.WORKLOADS["cpu"], **small), CPU)
    full, wrong = linear.Run("full", 0.5, "fp32"), linear.Run("int8", 0.5, "fp32")
    exact = []
    for each in (full, wrong):
        each.attempt(bench.check, exact)
        each.attempt(bench.time)
    assert full.error is None
    assert len(full.both) == 1
    assert wrong.error == "ArithmeticError: the output differs from that of full"
    assert linear.as_row(wrong, [full, wrong])["both_vs_full"] is None


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.95])
def test_the_largest_normal_numbers_have_the_energy_that_linear_expects(ratio):
    squares = torch.randn(1_000_000, dtype=torch.float64).square().sort().values
    share = squares[round(ratio * len(squares)) :].sum() / squares.sum()
    assert linear._largest(ratio) == pytest.approx(share.item(), rel=5e-3)


class Op:
    """An op whose kernel and body are given by what they make."""

    def __init__(self, made, body):
        self.name, self.made, self.body = "op", made, lambda: body
        self.kernels = {"cpu": self}

    def __call__(self):
        return self.made


def test_the_preset_of_a_card_is_found_by_what_torch_says(bench, monkeypatch):
    card = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=int(79.2 * 2**30))
    card.major, card.minor = 9, 0
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert bench("record").preset() == gpus.load("h100-80gb")


def test_what_first_launches_is_compiled_in_other_processes(bench, monkeypatch, tmp_path):
    """Kernels go there by name, and keys of Triton's cache are those of launches there too."""
    triton = pytest.importorskip("triton")
    from razorctl.ops.triton.recorded import Card

    first = bench("first")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    variants = first._recorded(2, Card(90), Recipe("int2"))
    sent = pickle.loads(pickle.dumps(variants))
    assert sent == variants
    assert {v.kernel[0].rpartition(".")[2] for v in sent} >= {"norm", "activation", "quantize"}
    assert first._compiled(90, sent[0]) is None
    assert list(tmp_path.glob("*/*.cubin"))
    module, name = sent[0].kernel
    assert "AttributeError" in first._compiled(90, replace(sent[0], kernel=(module, f"no_{name}")))


class TestAllocations:
    """The choice of bits, of two kinds and two tasks, and of what is made again."""

    KINDS = ("norm", "activation")

    @pytest.fixture
    def allocate(self, bench, monkeypatch):
        allocate = bench("allocate")
        monkeypatch.setattr(allocate, "KINDS", {"attention": self.KINDS})
        monkeypatch.setattr(allocate, "RULES", dict.fromkeys(self.KINDS, ("4-bit", "2-bit")))
        monkeypatch.setattr(allocate, "LEVELS", ((), ("activation",)))
        return allocate

    def test_a_kind_keeps_the_bits_that_no_ratio_needs(self, allocate):
        """Only the second model has norms, and is never the worst task."""
        norm = {("norm", "4-bit"): 4.0, ("norm", "2-bit"): 8.0}
        activation = {("activation", "4-bit"): 10.0, ("activation", "2-bit"): 20.0}
        none, make = dict.fromkeys((*norm, *activation), 0.0), allocate.Footprint
        one = [make(100, 30, none | activation), make(100, 8, none)]
        traced = {"one": one, "two": [make(100, 15, none | norm)] * 2}
        errors = {("", ""): 0.1, ("activation", "4-bit"): 0.1, ("activation", "2-bit"): 0.3}
        added = {
            "one": [errors, {("", ""): 0.15}],
            "two": [{("", ""): 0.0, ("norm", "4-bit"): 0.01, ("norm", "2-bit"): 0.02}] * 2,
        }
        choices = allocate.frontier("attention", added, traced)
        rules = [" ".join(choice.rules[kind] for kind in self.KINDS) for choice in choices]
        figures = [(choice.ratio, choice.level) for choice in choices]
        # What is made again in both is packed elsewhere as at level 0.
        assert dict(zip(rules, figures, strict=True)) == {
            "8-bit 8-bit": (0.7, 0),
            "8-bit 2-bit-again": (0.85, 1),
            "4-bit 2-bit-again": (0.89, 1),
            "2-bit 2-bit-again": (0.92, 1),
            "8-bit 4-bit": (0.8, 0),
            "8-bit 2-bit": (0.85, 0),
            "4-bit 2-bit": (0.89, 0),
            "2-bit 2-bit": (0.9, 0),
        }

    def test_errors_fall_with_bits_whatever_the_noise(self, allocate):
        noisy = {("norm", "6-bit"): 9e-4, ("norm", "5-bit"): 0.0, ("norm", "3-bit"): 5e-3}
        smooth = allocate.smoothed(noisy)
        assert smooth["norm", "6-bit"] < smooth["norm", "5-bit"] < smooth["norm", "3-bit"]


def test_allocations_are_those_of_the_result(bench):
    allocate, load = bench("allocate"), import_module("pages").load
    assert allocate.allocations(load("allocate")) == json.loads(allocate.FILE.read_text())


def test_weights_in_a_pickle_are_arrays_or_nothing(bench):
    with pytest.raises(pickle.UnpicklingError, match="is no array"):
        bench("pretrained").Arrays(io.BytesIO(pickle.dumps(print))).load()


@pytest.mark.parametrize(
    ("values", "least", "step"),
    [
        ([0.5, 0.9, 0.8, 0.9, 0.95], False, 40),
        ([0.9, 0.9], False, 10),
        ([0.95, 0.5], False, None),
        ([9.0, 0.7, 0.6], True, 20),
    ],
)
def test_a_target_is_reached_where_a_curve_stays(bench, values, least, step):
    curve = [(10 * number, value) for number, value in enumerate(values, 1)]
    assert bench("accuracy").reached(curve, 0.85, least) == step


def test_the_best_rate_has_the_least_mean_loss(bench):
    best_rate = bench("accuracy").best_rate
    losses = {3e-5: math.nan, 1e-4: 0.5, 3e-4: 0.7}
    trials = [
        {"case": "full", "seed": 0, "rate": rate, "loss": loss, "error": None}
        for rate, loss in losses.items()
    ]
    trials.append({**trials[1], "rate": 1e-3, "loss": None, "error": "diverged"})
    trials.append({**trials[1], "case": "razor", "rate": 1e-3, "loss": 0.1})
    assert best_rate(trials, "full") == 1e-4
    trials.append({**trials[1], "seed": 1, "loss": 1.0})
    assert best_rate(trials, "full") == 3e-4


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


def test_a_rate_that_is_known_is_the_one_that_was_found_in_fp32(bench):
    accuracy = bench("accuracy")
    for case in ("razor", "razor at 0.97", "razor, joint budget 0.5"):  # the last was never run
        assert accuracy.found_rates("fashion", case, True, "cpu") == (3e-5,)
    assert accuracy.found_rates("fashion", "razor", False, "cpu") == accuracy.TASKS["fashion"].rates


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


def test_fits_takes_the_largest_close_ratio(bench):
    job, largest = Job("vit-micro", "digits", precision="bf16"), Recipe(ratio=Job.max_ratio)
    assert bench("fits").razor(job, gpus.load("rtx-4060"), traces.Cache()) == largest


def test_fits_says_what_needs_lean_settings_or_another_ratio(bench, monkeypatch, tmp_path):
    fits, report = bench("fits"), bench("report")

    def fitting(job, card, recipe, cache):
        sizes = {("full", "adamw8bit"): None, ("razor", "adamw8bit"): 16, ("razor", None): None}
        return sizes.get((recipe.method, job.optimizer))

    out = tmp_path / "fits.json"
    monkeypatch.setattr(fits, "fitting", fitting)
    monkeypatch.setattr(fits, "razor", lambda *_: Recipe(ratio=0.5))
    words = ["fits", "--models", "gpt2", "--gpus", "rtx-3060", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    fits.main()
    monkeypatch.setattr(report, "load", lambda name: json.loads(out.read_text()))
    begin, end = "text\n<!-- fits: scripts/bench/report.py -->\n", "<!-- /fits -->\nmore\n"
    written = report.with_blocks(f"{begin}old\n{end}")  # it has no marks of another block
    rows = (
        "| model | `rtx-3060`, 12 GB |\n| --- | --- |\n| `gpt2`, ratio 0.5 | \N{EN DASH} → 16* |\n"
    )
    assert written == begin + rows + end


def test_planning_compares_a_prediction_with_what_a_card_took(monkeypatch):
    measured = {"allocated_bytes": 2**25, "reserved_bytes": 2**26, "context_bytes": 2**29}
    monkeypatch.setattr(planning, "measure_on_cuda", lambda point: measured)
    point = next(point for point in planning.grid("cpu") if point.name.startswith("vit-micro full"))
    row = planning.row(point, "cuda", gpus.load("h200"))
    predicted = row["predicted"]
    needed = predicted["peak_bytes"] + predicted["reserve_bytes"]
    assert row["over"] == pytest.approx(needed / (2**26 + 2**29) - 1)
