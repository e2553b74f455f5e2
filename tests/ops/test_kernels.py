"""Tests of the choice of the kernel of an op, and of its device."""

import subprocess
import sys
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from razorctl.ops import kernels
from razorctl.ops.op import FewBitCopy
from razorctl.ops.quantize import dequantize, quantize


def test_a_kernel_for_cuda_runs_on_the_device_of_its_tensors(monkeypatch):
    events, functions = [], {}

    @contextmanager
    def device_of(tensor):
        events.append(tensor.item())
        yield
        events.append("left")

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(kernels, "_ran", set())
    op = SimpleNamespace(name="op", body=None, register=functions.setdefault)
    for device in ("cuda", "cpu"):
        kernels.register(op, device)(lambda x, y: events.append("ran"))
        functions[device](torch.tensor(3), 4)
    assert events == [3, "ran", "left", "ran"]


def registered(kernel, device="cuda", name="op"):
    """The function that an op runs on a kind of device; the op's body returns "body"."""
    functions = {}
    op = SimpleNamespace(name=name, body=lambda x: "body", register=functions.setdefault)
    kernels.register(op, device)(kernel)
    return functions[device]


def failing(error):
    def kernel(x):
        raise error

    return kernel


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (RuntimeError("Triton Error [CUDA]: out of memory"), torch.OutOfMemoryError),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), torch.AcceleratorError),
    ],
)
def test_no_body_runs_where_it_would_fail_too(error, kind):
    with pytest.raises(kind) as raised:
        registered(failing(error))(torch.ones(1))
    assert raised.value is error or "the kernel of op" in str(raised.value)
    assert not kernels.failures()


def test_after_an_error_of_a_kernel_the_card_is_asked(monkeypatch):
    """Triton's errors do not say whether anything can run after them."""

    def synchronize(device):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

    card = SimpleNamespace(is_cuda=True, device=torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    run = registered(failing(RuntimeError("Triton Error [CUDA]: misaligned address")))
    with pytest.raises(torch.AcceleratorError) as raised:
        run(card)
    assert str(raised.value) == (
        "the kernel of op, or one before it, left the card unusable (CUDA error: an illegal memory "
        "access was encountered); run again with RAZORCTL_KERNELS=torch, which runs PyTorch "
        "operations instead"
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(kernels, "_probe", lambda: None)
    assert run(card) == "body"
    assert list(kernels.replaced()) == [("op", "cuda")]
    kernels._failed.clear()
    # A kernel that cannot be captured in a CUDA graph has not failed.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="misaligned"):
        run(card)
    assert not kernels.replaced()


@pytest.fixture
def ops(monkeypatch):
    """A list of errors, whose first the kernels of two ops raise, and what the ops run."""
    errors = []

    def kernel(x):
        raise errors[0]

    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    monkeypatch.setattr(kernels, "REGISTERED", {})
    yield errors, [registered(kernel, name=name) for name in ("op", "other")]
    kernels._failed.clear()
    kernels._off.clear()


@pytest.mark.parametrize(
    ("error", "probe", "why"),
    [
        # A cache that cannot be written.
        (PermissionError(13, "Permission denied", "/cache"), None, "Permission denied: '/cache'"),
        (OSError(30, "Read-only file system", "/cache"), None, "Read-only file system: '/cache'"),
        # A card that Triton or torch does not support, and an older driver.
        (RuntimeError("a"), RuntimeError("ptxas fatal: 'sm_70' is not defined"), "'sm_70' is not"),
        (RuntimeError("a"), RuntimeError("no kernel image is available"), "no kernel image"),
        (RuntimeError("a"), RuntimeError("unsupported toolchain\nmore"), "unsupported toolchain"),
        # A Triton that lacks a feature of all kernels.
        (TypeError("a"), AttributeError("module 'triton' has no attribute 'x'"), "attribute 'x'"),
    ],
)
def test_where_no_kernel_runs_one_warning_says_why(error, probe, why, ops, monkeypatch, caplog):
    errors, runs = ops
    errors.append(error)
    monkeypatch.setattr(kernels, "_probe", lambda: probe)
    monkeypatch.setattr(kernels, "find_spec", lambda name: True)
    assert [run(torch.ones(1)) for run in (*runs, *runs)] == ["body"] * 4
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith("no kernel of Triton runs here, so all ops run as PyTorch operations")
    assert why in message
    assert "\n" not in message
    state = kernels.state(torch.device("cuda"))
    assert state.startswith("PyTorch operations: ")
    assert why in state
    assert set(kernels.failures()) == {("op", "cuda"), ("other", "cuda")}
    assert registered(failing(error), name="late")(torch.ones(1)) == "body"
    assert len(caplog.records) == 1


def test_a_kernel_that_fails_where_others_run_is_the_only_one_replaced(ops, monkeypatch, caplog):
    errors, (run, _) = ops
    errors.append(RuntimeError("a feature that this Triton lacks"))
    monkeypatch.setattr(kernels, "_probe", lambda: None)
    assert [run(torch.ones(1)) for _ in range(2)] == ["body"] * 2
    (record,) = caplog.records
    assert record.getMessage().startswith("the kernel of op failed, so it runs as PyTorch")
    assert set(kernels.failures()) == {("op", "cuda")}


def test_kernels_that_cannot_be_imported_are_one_warning(ops, monkeypatch, caplog):
    names = []

    def fails(name):
        names.append(name)
        if ".triton." in name:
            raise AttributeError("module 'triton.language' has no attribute 'x'")

    monkeypatch.setattr(kernels, "import_module", fails)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("quantize", "norm"):
        kernels.attach(f"razorctl.ops.{name}")
    assert [name for name in names if ".triton." in name] == ["razorctl.ops.triton.quantize"]
    (record,) = caplog.records
    assert "razorctl.ops.quantize: module 'triton.language' has no attribute" in record.getMessage()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_need_not_be_on_the_current_device():
    x = torch.randn(130, 128, device="cuda:1")
    copy = quantize(x, 5, 64)
    want = quantize.body(x, 5, 64)
    got, want = (dequantize(FewBitCopy(*c, 5, 64), 130, x.dtype) for c in (copy, want))
    torch.testing.assert_close(got, want, atol=0.3, rtol=0)
    assert torch.cuda.current_device() == 0


def test_a_failed_kernel_is_named(monkeypatch):
    monkeypatch.setattr(kernels, "_ran", {("draw", "cuda"), ("topk_pack", "cuda")})
    monkeypatch.setitem(kernels._failed, ("topk_pack", "cuda"), "why")
    monkeypatch.setattr(kernels, "find_spec", lambda name: True)
    state, outcomes = kernels.state(torch.device("cuda")), kernels.outcomes(torch.device("cuda"))
    kernels._failed.clear()
    assert state == "fused kernels, by Triton, but PyTorch operations for topk_pack"
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert kernels.state(torch.device("cuda")) == "PyTorch operations: no Triton here"
    assert outcomes == {"draw": None, "topk_pack": "why"}


ON_A_CARD = """
import importlib, torch
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
importlib.import_module("razorctl.ops.gemm")
from razorctl.ops import kernels, op
assert not kernels._off, kernels._off
counted = {name for name, each in op.OPS.items() if each.fused}
assert counted <= {name for name, each in op.OPS.items() if "cuda" in each.kernels}
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_a_card_has_a_kernel_for_each_op_that_plans_count_one_for():
    subprocess.run([sys.executable, "-c", ON_A_CARD], check=True)
