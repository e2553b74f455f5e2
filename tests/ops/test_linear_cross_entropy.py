import pytest
import torch
import torch.nn.functional as F

from razorctl.ops import linear_cross_entropy as file
from razorctl.ops.linear_cross_entropy import (
    linear_cross_entropy,
    part_tokens,
)
from tests import references

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def arguments(tokens, device, dtype=torch.float32, bias=True, weight_dtype=None):
    x = torch.randn(tokens, 7, device=device).to(dtype)
    weight = torch.randn(11, 7, device=device).to(weight_dtype or dtype)
    target = torch.randint(11, (tokens,), device=device)
    target[::3] = -100
    return x, weight, torch.randn(11, device=device).to(weight.dtype) if bias else None, target


@pytest.mark.parametrize("tokens", [1, 13, 0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_and_gradients_equal_the_reference(tokens, smoothing, weighted, device, monkeypatch):
    monkeypatch.setattr(file, "LEAST", 4)
    monkeypatch.setattr(file, "BYTES", 1)
    args = arguments(tokens, device)
    factor = torch.randn(tokens, device=device) if weighted else None
    want = references.linear_cross_entropy(*args, -100, smoothing, factor)
    got = linear_cross_entropy(*args, -100, smoothing, factor, True, True, True)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-5)
    assert got[0][::3].eq(0).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_every_dtype(dtype, weight_dtype, device, monkeypatch):
    monkeypatch.setattr(file, "LEAST", 4)
    monkeypatch.setattr(file, "BYTES", 1)
    weight_dtype = dtype if dtype == torch.float64 else weight_dtype
    x, weight, bias, target = arguments(13, device, dtype, True, weight_dtype)
    cast = x, weight.to(dtype), bias.to(dtype), target
    want = references.linear_cross_entropy(*cast, -100, 0.0, None)
    losses, *grads = linear_cross_entropy(
        x, weight, bias, target, -100, 0.0, None, True, True, True
    )
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    assert [g.dtype for g in grads] == [dtype, weight.dtype, weight.dtype]
    for a, b in zip((losses, *grads), want, strict=True):
        assert (a.double() - b).norm() <= TOLERANCE[dtype] * b.norm()


def test_small_gradients_do_not_underflow_in_fp16(device):
    x, weight, _, target = arguments(13, device, torch.float16)
    weight = weight * 2**-10
    _, dx, *_ = linear_cross_entropy(x, weight, None, target, -100, 0.0, None, True, False, False)
    want = references.linear_cross_entropy(x, weight, None, target, -100, 0.0, None)[1]
    assert (dx.double() - want).norm() <= 1e-2 * want.norm()


def test_what_is_not_asked_for_is_empty(device):
    args = arguments(13, device)
    losses, *grads = linear_cross_entropy(*args, -100, 0.0, None, False, False, False)
    logits = F.linear(*args[:3])
    torch.testing.assert_close(losses, F.cross_entropy(logits, args[3], reduction="none"))
    assert [g.shape for g in grads] == [(0,)] * 3


def test_a_part_is_at_most_a_quarter_gibibyte_or_128_tokens():
    assert part_tokens(50257) * 50257 * 4 <= 2**28 < (part_tokens(50257) + 1) * 50257 * 4
    assert part_tokens(10**7) == 128
