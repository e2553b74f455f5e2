"""The normalized input of a norm after a residual connection, made again."""

from typing import Any

import pytest
import torch
from torch import Tensor

from razorctl.ops.norm_again import norm_again
from razorctl.ops.op import FewBitCopy
from tests.references import copied, dequantize


def arguments(
    rows: int, columns: int, tile_rows: int, form: str, dtype: torch.dtype, **on: Any
) -> tuple[tuple[Any, ...], Tensor]:
    """Arguments of `norm_again`, and z_hat in double precision."""
    x_hat, f = torch.randn(rows, columns, **on), 2 * torch.randn(rows, columns, **on) + 1
    copy, f = copied(x_hat, 5, tile_rows), f.to(dtype)
    gamma = torch.rand(columns, **on) if form == "scaled" else None
    z, mean, rstd = dequantize(copy, rows, torch.float32).double(), None, None
    if form == "of x":
        copy = copy._replace(bias=torch.randn(columns, **on))
        z = z + copy.bias
    else:
        mean, rstd = torch.randn(rows, 1, **on), torch.rand(rows, 1, **on) + 0.5
        z = z / rstd + mean
    z = z + (f if gamma is None else f.double() * gamma)
    centers = form != "of x"
    sum_mean = z.mean(1, keepdim=True).float() if centers else None
    sum_rstd = 1 / z.std(1, keepdim=True).float()
    z_hat = (z - sum_mean if centers else z) * sum_rstd
    return (copy, f, gamma, mean, rstd, sum_mean, sum_rstd), z_hat


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["of x_hat", "of x", "scaled"])
def test_values(form, dtype, device):
    args, z_hat = arguments(50, 64, 20, form, dtype, device=device)
    made = FewBitCopy(*norm_again(*args), 8, 20)
    step = made.scale.float().repeat_interleave(20, 0)[:50]
    got = dequantize(made, 50, torch.float32)
    assert ((got - z_hat).abs() <= 0.6 * step + 1e-6).all()


def test_no_rows(device):
    args = [t if t is None else t[:0] for t in arguments(9, 64, 20, "of x", torch.float32)[0][1:]]
    copy = copied(torch.empty(0, 64, device=device), 5, 20)
    assert norm_again(copy, *(t if t is None else t.to(device) for t in args))[0].shape == (0,)
