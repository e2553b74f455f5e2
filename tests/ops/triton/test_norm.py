import pytest
import torch

from razorctl.ops.norm import gradients, normalize, statistics
from tests import references
from tests.ops.triton.test_int8 import alike as alike_int8
from tests.ops.triton.test_quantize import TYPES, activation, alike


@pytest.fixture
def kernels(interpreted):
    from razorctl.ops.triton import norm

    return interpreted(norm)


# Every number of bits, and 2 bits, whose ends are clipped, in both kernels of copies.
@pytest.mark.parametrize(
    ("centers", "affine", "tile_rows", "bits"),
    [
        (True, True, 8, 5),
        (True, False, 300, 2),
        (False, True, 300, 8),
        (False, False, 8, 2),
        (True, True, 8, 6),
        (False, True, 8, 4),
        (True, True, 300, 3),
    ],
)
def test_norm_quantize(centers, affine, tile_rows, bits, kernels):
    x = activation(20, 320)
    weight, bias = (torch.randn(320), torch.randn(320)) if affine else (None, None)
    bias = bias if centers else None
    y, rstd, *copy = kernels.norm_quantize(
        x.view(4, 5, 320), weight, bias, 1e-5, centers, bits, tile_rows, torch.float32
    )
    mean, want = statistics(x, 1e-5, centers)
    torch.testing.assert_close(rstd, want)
    normalized = (x if mean is None else x - mean) * want
    shown = normalized if weight is None else normalized * weight
    torch.testing.assert_close(
        y.view(20, 320), shown if bias is None else shown + bias, rtol=1e-5, atol=2e-5
    )
    alike(copy, references.quantize(x, bits, tile_rows, mean, rstd), bits, 20, 320)
    # With statistics that are not those of x, to see that they count.
    mean, rstd = (torch.randn(20, 1) if centers else torch.empty(0)), torch.rand(20, 1)
    got, empty, *copy = kernels.norm_quantize(
        x.view(4, 5, 320), weight, bias, 1e-5, centers, bits, tile_rows, torch.float32, mean, rstd
    )
    x_hat = (x - mean if centers else x) * rstd
    shown = x_hat if weight is None else x_hat * weight
    torch.testing.assert_close(
        got.view(20, 320), shown if bias is None else shown + bias, rtol=1e-5, atol=2e-5
    )
    assert empty.shape == (0,)
    used_mean = mean if centers else None
    alike(copy, references.quantize(x, bits, tile_rows, used_mean, rstd), bits, 20, 320)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("wide", TYPES[:2])
@pytest.mark.parametrize("centers", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (21, 63), (5, 2100)])
def test_residual_add(rows, columns, centers, wide, dtype, kernels):
    x = activation(rows, columns, wide).view(1, rows, columns)
    f = (100 * torch.randn(rows, columns)).to(dtype).view(1, rows, columns)
    y, mean, rstd = kernels.residual_add(x, f, 1e-5, centers)
    want = x + f
    assert y.dtype == want.dtype
    # The interpreter truncates to bfloat16.
    torch.testing.assert_close(y, want, rtol=2**-7 if y.dtype == torch.bfloat16 else 0, atol=0)
    wanted = statistics(y.view(rows, columns), 1e-5, centers)
    torch.testing.assert_close(rstd, wanted[1])
    if centers:
        torch.testing.assert_close(mean, wanted[0])
    else:
        assert mean.shape == (0,)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("centers", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (21, 63), (5, 2100)])
def test_normalize(rows, columns, centers, dtype, kernels):
    x = activation(rows, columns + 3, dtype)[:, :columns]
    weight, bias = (torch.randn(columns), torch.randn(columns)) if rows > 5 else (None, None)
    args = x, weight, bias if centers else None, 1e-5, centers
    for out in (torch.float32, torch.bfloat16):
        got, want = kernels.normalize(*args, out), normalize.body(*args, out)
        assert got[0].dtype == out
        # Triton's kernels compute in single precision, from a mean of their own.
        rounding = 2**-7 if torch.bfloat16 in (dtype, out) else 2e-5
        torch.testing.assert_close(got[0], want[0], rtol=rounding, atol=rounding)
        torch.testing.assert_close(got[1:], want[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("centers", [True, False])
@pytest.mark.parametrize(
    ("rows", "columns", "tile_rows", "bits"), [(1, 64, 1, 6), (75, 192, 36, 5)]
)
def test_norm_grad(rows, columns, tile_rows, bits, centers, dtype, kernels):
    dy, rstd = torch.randn(rows, columns + 8).to(dtype)[:, :columns], torch.rand(rows, 1)
    weight = torch.randn(columns) if centers else None
    copy = references.quantize(torch.randn(rows, columns), bits, tile_rows)
    x_hat = references.dequantize(copy, rows, torch.float32)
    residual = None if rows == 1 else torch.randn(rows, columns + 8)[:, 8:]
    more = weight, rstd, centers, residual
    dx, *sums = kernels.norm_grad(dy, copy, *more)
    want, *wanted = gradients(dy, x_hat, *more)
    torch.testing.assert_close([dx, *sums], [want, *wanted], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "tile_rows", "bits"), [(1, 1, 8), (75, 36, 3)])
def test_norm_grad_int8(rows, tile_rows, bits, dtype, kernels):
    dy, rstd = torch.randn(rows, 192).to(dtype), torch.rand(rows, 1)
    dy[rows // 2] = 0
    copy = references.quantize(torch.randn(rows, 192), bits, tile_rows)
    residual = torch.randn(rows, 192).to(dtype) if rows > 1 else None
    more = torch.randn(192), rstd, dtype == torch.float32, residual
    want = kernels.norm_grad(dy, copy, *more)
    *got, codes, scale, total, largest = kernels.norm_grad_int8(dy, copy, *more)
    torch.testing.assert_close(got, list(want), rtol=0, atol=0)
    wanted = references.int8_rows(want[0])
    alike_int8(codes, wanted[0])
    torch.testing.assert_close([scale, total, largest], list(wanted[1:]), rtol=1e-6, atol=1e-5)


def test_norm_grad_int8_of_what_is_not_finite(kernels):
    dy, rstd = torch.randn(4, 64), torch.ones(4, 1)
    copy = references.quantize(torch.randn(4, 64), 4, 4)
    residual = torch.zeros(4, 64)
    residual[1, 3], residual[2, 5] = float("nan"), float("inf")
    dx, *_, codes, scale, _, _ = kernels.norm_grad_int8(dy, copy, None, rstd, True, residual)
    want = references.int8_rows(dx)
    torch.testing.assert_close(scale, want[1], equal_nan=True)
    assert scale[1].isnan()
    assert torch.equal(codes[[0, 2, 3]], want[0][[0, 2, 3]])
