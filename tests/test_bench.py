"""The benches: what they refuse to time or to read, how they count, and what they choose."""

import io
import json
import math
import pickle
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from razorctl import Job, Recipe
from razorctl.layers.kinds.linear import Linear
from razorctl.memory import trace_cache as traces
from razorctl.ops.op import OPS
from razorctl.planning import gpus
from razorctl.planning.times import LAUNCH
from scripts.bench import linear, planning

CPU = torch.device("cpu")


@pytest.fixture
def roofline():
    import roofline

    return roofline


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
    for row in rows:
        figures = (row["forward_vs_full"], row["both_seconds"], row["saved_bytes"])
        assert all(figures) if row["error"] is None else not any(figures)


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


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "capability", "share"),
    [
        (128, 0, 8, 80, 16 / 64),  # registers: four warps for each partition
        (40, 0, 8, 86, 1.0),
        (32, 48 * 1024, 4, 89, 8 / 48),  # shared memory: 49 KiB with what is reserved
        (32, 0, 1, 89, 24 / 48),  # blocks
        (64, 32 * 1024, 8, 75, 16 / 32),  # nothing is reserved
        (33, 0, 4, 90, 48 / 64),  # registers come in 256 for a warp
    ],
)
def test_occupancy(roofline, registers, shared, warps, capability, share):
    assert roofline.occupancy(registers, shared, warps, capability) == share


def test_every_fused_op_has_a_case_and_agrees_with_its_body(roofline):
    cases = roofline.cases()
    assert {case.op for case in cases} == {op for op in OPS.values() if op.fused is not None}
    for case in cases:
        roofline.check(case, 1, CPU)


class Op:
    """An op whose kernel and body are given by what they make."""

    def __init__(self, made, body):
        self.name, self.made, self.result = "op", made, body
        self.kernels = {"cpu": self}

    def __call__(self):
        return self.made

    def body(self):
        return self.result


@pytest.mark.parametrize(
    ("made", "right"),
    [
        (torch.ones(100), True),
        (torch.full((100,), 1.001), True),
        (torch.full((100,), 1.1), False),
        (torch.full((100,), torch.nan), False),
        (torch.ones(100, dtype=torch.float64), False),
        (torch.ones(99), False),
    ],
)
def test_roofline_gives_no_time_to_a_wrong_result(roofline, made, right):
    codes = torch.arange(100) // 2
    for op in (Op(made, torch.ones(100)), Op(codes, codes + (not right))):
        case = SimpleNamespace(op=op, name="op", args=lambda *_: ())
        if right:
            roofline.check(case, 1, CPU)
        else:
            with pytest.raises(ArithmeticError):
                roofline.timed(case, 1, CPU)


def test_a_gemm_takes_its_operations_over_the_rate(roofline):
    case = next(c for c in roofline.cases() if (c.name, c.of) == ("scaled_gemm", "fc1, dX"))
    cost, gpu = roofline.counted(case, 128, dot=True), gpus.load("rtx-3090")
    operations = 2 * 128 * 197 * 768 * 3072
    assert roofline.work(cost)["operations"] == operations
    filled = gpu.filled(128 * 197 // 128 * 768 // 128)
    expected = LAUNCH + operations / (gpu.rates["int8"] * gpu.achieved.of("int8") * filled)
    assert roofline.implied(cost, gpu).low == pytest.approx(expected)
    assert roofline.implied(cost, gpu).high > 1.05 * expected
    # Two parts of at most 64 MiB of int32, each in two kernels.
    assert roofline.work(roofline.counted(case, 128, dot=False))["launches"] == 4


def test_roofline_knows_what_each_kernel_launches(roofline):
    pytest.importorskip("triton")
    for case in roofline.cases():
        for capability in (75, 89):
            labels = [variant.label for variant in roofline.variants(case, capability)]
            if "cuda" in case.op.kernels and case.name != "scaled_gemm":
                assert len(labels) == len(set(labels)) == len(case.launches), case
            elif case.name == "scaled_gemm":
                assert len(labels) == (1 if capability == 75 else 6), case


def test_the_preset_of_a_card_is_found_by_what_torch_says(roofline, monkeypatch):
    card = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=int(79.2 * 2**30))
    card.major, card.minor = 9, 0
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert roofline.preset() == gpus.load("h100-80gb")


def test_what_first_launches_is_compiled_in_other_processes(monkeypatch, tmp_path):
    """Kernels go there by name, and keys of Triton's cache are those of launches there too."""
    triton = pytest.importorskip("triton")
    import first

    from razorctl.ops.triton.recorded import Card

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    variants = first._recorded(2, Card(90), Recipe("int2"))
    sent = pickle.loads(pickle.dumps(variants))
    assert sent == variants
    assert {v.kernel[0].rpartition(".")[2] for v in sent} >= {"norm", "activation", "quantize"}
    assert first._compiled(90, sent[0]) is None
    assert list(tmp_path.glob("*/*.cubin"))
    module, name = sent[0].kernel
    assert "AttributeError" in first._compiled(90, replace(sent[0], kernel=(module, f"no_{name}")))


def test_roofline_writes_what_it_counts(roofline, monkeypatch, tmp_path):
    pytest.importorskip("triton")
    document = run(roofline, monkeypatch, tmp_path)
    assert all(row["measured_seconds"] is row["error"] is None for row in document["rows"])
    rows = {row["op"]: row for row in document["rows"]}
    (label,) = rows["activation_grad"]["kernels"]["8.9"]
    kernel = document["kernels"]["8.9"][label]
    assert 0 < kernel["occupancy"] <= 1
    assert 0 < kernel["registers"] <= 255


class TestAllocations:
    """The choice of bits, of two kinds and two tasks, and of what is made again."""

    KINDS = ("norm", "activation")

    @pytest.fixture
    def allocate(self, monkeypatch):
        pytest.importorskip("onnx")
        import allocate

        monkeypatch.setattr(allocate, "KINDS", {"attention": self.KINDS})
        monkeypatch.setattr(allocate, "RULES", dict.fromkeys(self.KINDS, ("4-bit", "2-bit")))
        monkeypatch.setattr(allocate, "LEVELS", ((), ("activation",)))
        return allocate

    def test_a_kind_keeps_the_bits_that_no_ratio_needs(self, allocate):
        """Only the second model has norms, and is never the worst task."""
        norm = {("norm", "4-bit"): 4.0, ("norm", "2-bit"): 8.0}
        activation = {("activation", "4-bit"): 10.0, ("activation", "2-bit"): 20.0}
        none = dict.fromkeys((*norm, *activation), 0.0)
        second = [allocate.Footprint(100, 15, none | norm)] * 2
        traced = {
            "one": [
                allocate.Footprint(100, 30, none | activation),
                allocate.Footprint(100, 8, none),
            ],
            "two": second,
        }
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


def test_weights_in_a_pickle_are_arrays_or_nothing():
    pytest.importorskip("onnx")
    import pretrained

    with pytest.raises(pickle.UnpicklingError, match="is no array"):
        pretrained.Arrays(io.BytesIO(pickle.dumps(print))).load()


@pytest.fixture
def accuracy():
    pytest.importorskip("onnx")
    import accuracy

    return accuracy


@pytest.mark.parametrize(
    ("values", "least", "step"),
    [
        ([0.5, 0.9, 0.8, 0.9, 0.95], False, 40),
        ([0.9, 0.9], False, 10),
        ([0.95, 0.5], False, None),
        ([9.0, 0.7, 0.6], True, 20),
    ],
)
def test_a_target_is_reached_where_a_curve_stays(accuracy, values, least, step):
    curve = [(10 * number, value) for number, value in enumerate(values, 1)]
    assert accuracy.reached(curve, 0.85, least) == step


def test_the_best_rate_has_the_least_mean_loss(accuracy):
    losses = {3e-5: math.nan, 1e-4: 0.5, 3e-4: 0.7}
    trials = [
        {"case": "full", "seed": 0, "rate": rate, "loss": loss, "error": None}
        for rate, loss in losses.items()
    ]
    trials.append({**trials[1], "rate": 1e-3, "loss": None, "error": "diverged"})
    trials.append({**trials[1], "case": "razor", "rate": 1e-3, "loss": 0.1})
    assert accuracy.best_rate(trials, "full") == 1e-4
    trials.append({**trials[1], "seed": 1, "loss": 1.0})
    assert accuracy.best_rate(trials, "full") == 3e-4


def test_rows_compare_with_full_by_the_mean_of_the_seeds(accuracy):
    curves = {"full": [0.5, 0.8, 1.0], "razor": [0.6, 1.0, 1.0], "lora": [0.1, 0.2, 0.3]}
    runs = [
        {
            "case": case,
            "seed": seed,
            "rate": 1e-4,
            "metric": "accuracy",
            "error": None,
            "score": curve[-1] - 0.01 * seed,
            "steps": 30,
            "peak_bytes": None,
            "saved_bytes": 1,
            "full_saved_bytes": 10,
            "loss": 1.0,
            "curve": list(zip((10, 20, 30), curve, strict=True)),
        }
        for case, curve in curves.items()
        for seed in range(accuracy.TASKS["fashion"].seeds)
    ]
    times = [{"case": "full", "step_seconds": 2.0, "step_time_vs_full": 1.0}]
    times.append({"case": "razor", "step_seconds": 1.5, "step_time_vs_full": 0.75})
    document = {"runs": runs[:-1], "times": times, "cases": list(curves)}  # lora lacks a seed
    full, razor = accuracy.rows("fashion", document)
    assert (full["time_to_target_vs_full"], razor["time_to_target_vs_full"]) == (1.0, 0.5)
    assert razor["delta_vs_full"] == pytest.approx(0)
    assert full["accuracy_mean"] == pytest.approx(0.99)
    assert full["accuracy_std"] == pytest.approx(0.01)


def test_a_rate_that_is_known_is_the_one_that_was_found_in_fp32(accuracy):
    for case in ("razor", "razor at 0.97", "razor, joint budget 0.5"):  # the last was never run
        assert accuracy.found_rates("fashion", case, True, "cpu") == (3e-5,)
    assert accuracy.found_rates("fashion", "razor", False, "cpu") == accuracy.TASKS["fashion"].rates


def test_gradients_in_bf16_are_compared_with_exact_ones_in_fp32():
    pytest.importorskip("onnx")
    import gradients

    def load(_):
        rows = {"images": torch.randn(32, 64), "labels": torch.arange(32) % 10}
        return rows, rows

    def build(_):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    task = gradients.Task(
        *("tiny", "", build, load, lambda rows: rows["images"], {}),
    )
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


def test_the_worst_parameter_is_a_part_of_a_fused_projection():
    pytest.importorskip("onnx")
    from passes import worst

    want = {
        "at.qkv.weight": torch.ones(6, 4),
        "at.qkv.bias": torch.ones(6),
        "head.weight": torch.ones(9),
    }
    got = {name: value.clone() for name, value in want.items()}
    got["at.qkv.weight"][2:4, :2] = -1  # k
    got["at.qkv.bias"][2:4] = -1  # whose exact gradient is zero
    assert worst(got, want) == {
        "parameter": "at.qkv.weight[k]",
        "cosine": pytest.approx(0),
        "relative_error": pytest.approx(2**0.5),
        "signs": pytest.approx(0.5),
    }


def test_a_step_of_razor_launches_and_calls_no_more_than_it_did():
    pytest.importorskip("triton")
    import host

    counts = host.counts()
    razor = counts["razor"]
    assert razor["launches"] == sum(razor["by_kernel"].values()) <= 420
    assert razor["op_calls"] <= 300
    assert razor["aten_calls"] < counts["full"]["aten_calls"]
    assert counts["full"]["launches"] == counts["full"]["op_calls"] == 0


@pytest.mark.parametrize(("mib", "batch"), [(640, None), (664, 16), (4096, 1024)])
def test_fits_takes_the_largest_batch_up_to_most(mib, batch):
    import fits

    card = replace(gpus.load("rtx-4060"), memory_bytes=mib << 20)
    job = Job("vit-micro", "digits", precision="bf16")
    assert fits.fitting(job, card, Recipe("full"), traces.Cache()) == batch


def test_fits_takes_the_largest_close_ratio():
    import fits

    job = Job("vit-micro", "digits", precision="bf16")
    assert fits.razor(job, gpus.load("rtx-4060"), traces.Cache()) == Recipe(ratio=Job.max_ratio)


def test_fits_says_what_needs_lean_settings_or_another_ratio(monkeypatch, tmp_path):
    import fits
    import report

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
    written = report.with_blocks(f"{begin}old\n{end}")
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
