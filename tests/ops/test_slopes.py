import math

import pytest
import torch

from razorctl.ops.slopes import slope_bits, slope_grad
from razorctl.ops.topk import unpack_bits

SPECIAL = [0.0, -0.0, 6.0, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("count", [6, 77, 4099])
@pytest.mark.parametrize("high", [6.0, math.inf])
@pytest.mark.parametrize("outside", [0.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_are_those_of_the_slopes(count, high, outside, dtype, device):
    x = (4 * torch.randn(count, device=device)).to(dtype)
    x[:6] = torch.tensor(SPECIAL)
    dy = torch.randn(count, device=device).to(dtype)
    dy[1] = math.inf
    bits = slope_bits(x, 0.0, high)
    assert bits.numel() == (count + 7) // 8
    inside = x > 0 if high == math.inf else (x > 0) & (x < high)
    assert torch.equal(unpack_bits(bits, count), inside)
    got = slope_grad(dy, bits, 0.5, outside)
    want = torch.where(inside, dy * 0.5, dy * outside if outside else 0)
    assert got.dtype == dtype
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "all_columns"), [(3, 77, 100), (2, 4099, 8198)])
def test_rows_may_lie_apart(rows, columns, all_columns, dtype, device):
    x = torch.randn(rows * columns, device=device)
    bits = slope_bits(x, 0.0, math.inf)
    dy = torch.randn(rows, all_columns, device=device).to(dtype)[:, -columns:]
    got = slope_grad(dy, bits, 0.5, 0.25)
    assert torch.equal(got, slope_grad(dy.reshape(-1), bits, 0.5, 0.25).view(dy.shape))
    assert got.is_contiguous()
