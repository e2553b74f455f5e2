"""Predicted times of groups of kernels of a ViT-B/16 step, against those of an H100."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.memory import tracker
from razorctl.memory.trace_cache import KernelWork
from razorctl.planning import gpus, job_trace, times

CASES = {"full, CUDA graphs": Recipe("full"), "razor, CUDA graphs": Recipe("razor", 0.9)}
OPS = {
    "scaled_gemm": "int8 GEMMs",
    "linear_operands": "codes of operands",
    "activation_grad_int8": "activation gradients",
    **dict.fromkeys(("quantize", "norm_quantize"), "few-bit copies"),
    **dict.fromkeys(("norm_grad", "norm_grad_int8"), "norm gradients"),
    "native_layer_norm_backward": "norm gradients",
    **dict.fromkeys(("residual_add", "native_layer_norm"), "residual sums and norms"),
    **dict.fromkeys(("int8_heads", "linear_again", "linear_copy_again"), "int8 rows"),
    **dict.fromkeys(("gelu", "gelu_backward"), "GELU"),
    **dict.fromkeys(("mm", "addmm", "convolution", "convolution_backward"), "bf16 GEMMs"),
    "_fused_sgd_": "optimizer",
}
# phases.py clips no gradient.
CLIPPING = {"_foreach_norm", "linalg_vector_norm", "_foreach_mul_"}
NEAR, LESS_NEAR = 0.15, 0.25
# Of few bytes, where latency counts; and residual sums, which find a part in the cache.
SMALL = {"column sums", "int8 rows", "other", "residual sums and norms"}
# Kernels that got faster after they were measured in the step, by their times alone (time.md).
SINCE = {"codes of operands": 0.37 / 0.48, "norm gradients": 0.093 / 0.125}


def group(op: str, kernel: KernelWork) -> str:
    """The group of a kernel of an op, as phases.py names it."""
    if kernel.own and not kernel.bytes and op != "linear_operands":
        return "column sums"
    if "attention" in op:
        return "attention" if kernel.op else "other"  # cuDNN's extra passes have other names
    name = OPS.get(op, "other")
    if name == "int8 rows" and kernel.precision == "int8":
        return "int8 GEMMs"
    return "other" if name == "bf16 GEMMs" and not kernel.operations else name


@pytest.mark.parametrize("case", CASES)
def test_groups_of_kernels_take_what_they_took_on_an_h100(case, monkeypatch):
    found, cost = Counter[tuple[str, KernelWork]](), tracker.cost

    def noted(operation, args, kwargs, result):
        said = cost(operation, args, kwargs, result)
        name = operation.overloadpacket.__name__
        found.update({(name, kernel): n for kernel, n in said.kernels.items()})
        return said

    monkeypatch.setattr(tracker, "cost", noted)
    job = Job("vit-b16", "random", batch_size=128, precision="bf16", optimizer="sgd")
    job = job.resolved({"learning_rate": 1e-3, "weight_decay": 0.0}, 128)
    job_trace.trace(replace(job, cuda_graphs=True), CASES[case], 1000)
    gpu, predicted = gpus.load("h100-80gb"), Counter[str]()
    for (op, kernel), count in found.items():
        if op not in CLIPPING:
            predicted[group(op, kernel)] += count * times._kernel(kernel, gpu).likely
    rows = json.loads(Path("scripts/bench/results/phases_cuda.json").read_text())["rows"]
    measured = next(row["groups"] for row in rows if row["case"] == case)
    assert predicted.keys() == measured.keys()
    for name, seconds in measured.items():
        since = SINCE.get(name, 1.0) if CASES[case].method == "razor" else 1.0
        near = LESS_NEAR if name in SMALL else NEAR
        assert predicted[name] == pytest.approx(since * seconds, rel=near), name
