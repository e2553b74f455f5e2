"""Norms with a copy of the normalized input, and their gradient from it."""

import pytest
import torch
import torch.nn.functional as F

from razorctl.ops.norm import gradients, norm_grad, norm_quantize, normalize, residual_add
from razorctl.ops.op import FewBitCopy
from razorctl.ops.quantize import dequantize, quantize

EPS = 1e-5
every_norm = pytest.mark.parametrize("centers", [True, False], ids=["layer norm", "RMS norm"])


def normalized(x: torch.Tensor, centers: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x_hat and 1 / std of the rows, in double precision."""
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if centers else x
    rstd = (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return x * rstd, rstd


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal on a CPU; the kernels of a card may add the terms of a sum in another order."""
    ulps = 4 * torch.finfo(want.dtype).eps if got.is_cuda else 0
    torch.testing.assert_close(got, want, rtol=ulps, atol=ulps)


@every_norm
@pytest.mark.parametrize("shape", [(2, 13, 7), (50, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
def test_output_and_copy(shape, dtype, centers, affine, device):
    x = (2 * torch.randn(shape, device=device) + 1).to(dtype)
    weight = torch.randn(shape[-1:], device=device).to(dtype) if affine else None
    bias = torch.randn(shape[-1:], device=device).to(dtype) if affine and centers else None
    y, rstd, *copy = norm_quantize(x, weight, bias, EPS, centers, 4, 20, dtype)
    if centers:
        same(y, F.layer_norm(x, x.shape[-1:], weight, bias, EPS))
    else:
        same(y, F.rms_norm(x, x.shape[-1:], weight, EPS))
    x_hat, want = normalized(x.flatten(0, -2), centers)
    torch.testing.assert_close(rstd, want.float())
    for got, expected in zip(copy, quantize(x_hat.float(), 4, 20), strict=True):
        far = (got.double() - expected.double()).abs()  # an ulp may decide which code is nearer
        assert (far > 1e-2 * expected.double().abs().max()).float().mean() < 0.02


@every_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_and_the_statistics_of_its_rows(affine, dtype, centers, device):
    x = (2 * torch.randn(2, 13, 7, device=device) + 1).to(dtype)
    weight, bias = torch.randn(2, 7, device=device).to(dtype) if affine else [None, None]
    bias = bias if centers else None
    y, mean, rstd = normalize(x, weight, bias, EPS, centers, dtype)
    _, want_rstd, *_ = norm_quantize(x, weight, bias, EPS, centers, 4, 20, dtype)
    if centers:
        same(y, F.layer_norm(x, (7,), weight, bias, EPS))
        torch.testing.assert_close(mean, x.float().flatten(0, 1).mean(1, keepdim=True))
    else:
        same(y, F.rms_norm(x, (7,), weight, EPS))
        assert mean.shape == (0,)
    same(rstd, want_rstd)


@every_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
def test_a_sum_and_the_statistics_of_its_rows(wide, dtype, centers, device):
    x = (2 * torch.randn(2, 13, 7, device=device) + 1).to(wide)
    f = torch.randn(2, 13, 7, device=device).to(dtype)
    y, mean, rstd = residual_add(x, f, EPS, centers)
    want = x + f
    assert y.dtype == want.dtype
    assert torch.equal(y, want)
    torch.testing.assert_close(rstd, normalized(want.flatten(0, 1), centers)[1].float())
    if centers:
        torch.testing.assert_close(mean, want.flatten(0, 1).float().mean(1, keepdim=True))
    else:
        assert mean.shape == (0,)


@every_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
def test_statistics_that_are_known(affine, dtype, centers, device):
    x = torch.randn(2, 25, 64, device=device).to(dtype)
    weight, bias = torch.randn(2, 64, device=device) if affine else [None, None]
    y, mean, rstd = residual_add(x, x, EPS, centers)
    args = weight, bias, EPS, centers, 4, 20, torch.bfloat16
    got, want = norm_quantize(y, *args, mean, rstd), norm_quantize(y, *args)
    x_hat = normalized(y, centers)[0]
    shown = x_hat if weight is None else x_hat * weight + bias
    torch.testing.assert_close(got[0].double(), shown, rtol=2**-7, atol=2**-7)
    assert got[0].dtype == torch.bfloat16
    assert got[1].shape == (0,)
    torch.testing.assert_close(want[1], rstd)
    for ours, theirs in zip(got[2:], want[2:], strict=True):
        far = (ours.double() - theirs.double()).abs()
        assert (far > 1e-2 * theirs.double().abs().max()).float().mean() < 0.02
    # Others than those of y, to see that they count.
    twice = norm_quantize(y, None, None, *args[2:], mean, 2 * rstd)[0]
    torch.testing.assert_close(twice.double(), 2 * x_hat, rtol=2**-7, atol=2**-7)


@every_norm
@pytest.mark.parametrize("affine", [True, False])
def test_gradient_from_a_copy(centers, affine, device):
    x, dy = torch.randn(50, 9, device=device), torch.randn(50, 9, device=device)
    weight = torch.randn(9, device=device) if affine else None
    residual = torch.randn(50, 9, device=device)
    _, rstd, *copy = norm_quantize(x, weight, None, EPS, centers, 5, 20, torch.float32)
    copy = FewBitCopy(*copy, 5, 20)
    got = norm_grad(dy, copy, weight, rstd, centers, residual)
    x_hat = dequantize(copy, 50, torch.float32)
    g = dy.double() if weight is None else dy.double() * weight
    dx = g - x_hat * (g * x_hat).mean(1, keepdim=True)
    dx = (dx - g.mean(1, keepdim=True) if centers else dx) * rstd + residual
    for results in (got, gradients(dy, x_hat, weight, rstd, centers, residual)):
        torch.testing.assert_close(results[0], dx.float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(results[1], (dy * x_hat).sum(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(results[2], dy.sum(0), rtol=1e-4, atol=1e-5)


@every_norm
def test_no_rows(centers, device):
    args = None, None, EPS, centers, 4, 20, torch.float32
    assert norm_quantize(torch.empty(0, 9, device=device), *args)[0].shape == (0, 9)
    x = torch.empty(0, 11, 9, device=device)
    assert residual_add(x, x, EPS, centers)[2].shape == (0, 1)
