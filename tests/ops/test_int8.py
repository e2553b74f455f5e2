import pytest
import torch

from razorctl.ops.int8 import (
    LEVELS,
    int8_columns,
    int8_rows,
)
from tests import references

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def with_scales(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the rows of `x` (dim 1) or of its columns (dim 0), along x."""
    if dim == 1:
        return int8_rows(x)[:2]
    got, scale = int8_columns(x)
    return got.t(), scale.unsqueeze(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", [(40, 7), (1, 5), (13, 1)])
def test_int8_is_within_half_a_step(shape, dim, dtype, device):
    x = torch.randn(shape, device=device).to(dtype)
    got, scale = with_scales(x, dim)
    assert got.dtype == torch.int8
    assert got.abs().max() == LEVELS
    assert scale.shape == x.amax(dim, keepdim=True).shape
    back = got.double() * scale.double()
    assert ((back - x.double()).abs() <= scale.double() / 2 * (1 + 1e-5)).all()
    torch.testing.assert_close(got.T.contiguous(), with_scales(x.T, 1 - dim)[0].contiguous())
    torch.testing.assert_close(int8_rows(x)[2].double(), x.double().sum(0), rtol=1e-5, atol=1e-5)


def test_chunks_change_nothing(device, monkeypatch):
    x = torch.randn(50, 7, device=device)
    monkeypatch.setattr("razorctl.ops.chunks.CACHED", {"cpu": 130})
    for got, want in zip(int8_rows(x), references.int8_rows(x), strict=True):
        torch.testing.assert_close(got, want)
    for got, want in zip(int8_columns(x), references.int8_columns(x), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_degenerate_values(dtype, device):
    huge = 0.99 * torch.finfo(dtype).max
    for value in (0.0, 1.0, -3.0, huge, -huge, 1e-30, 1e-42):
        x = torch.full((6, 3), value, device=device, dtype=dtype)
        for dim in (0, 1):
            got, scale = with_scales(x, dim)
            torch.testing.assert_close((got * scale).to(dtype), x, rtol=1e-2, atol=1e-37)
    for empty in ((0, 3), (3, 0)):
        for dim in (0, 1):
            got, scale = with_scales(torch.empty(empty, device=device), dim)
            assert got.shape == empty
            assert scale.shape[dim] == 1


def test_a_row_with_a_nan_has_a_scale_of_nan(device):
    x = torch.randn(20, 64, device=device)
    x[3, 5] = torch.nan
    _, scale, total, largest = int8_rows(x)
    assert scale.isnan().nonzero().tolist() == [[3, 0]]
    assert total.isnan().nonzero().tolist() == largest.isnan().nonzero().tolist() == [[5]]
    assert int8_columns(x)[1].isnan().nonzero().tolist() == [[5]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("run", ["kernel", "body"])
def test_what_is_infinite_has_an_outmost_code(run, dtype, device):
    x = torch.tensor([[1, torch.inf, -torch.inf, 0] * 16], device=device).to(dtype)
    of_rows, of_columns = ((op, op.body)[run == "body"] for op in (int8_rows, int8_columns))
    for codes in (of_rows(x)[0], of_rows(x.t().contiguous())[0].t()):
        assert codes[0, 1:3].tolist() == [LEVELS, -LEVELS]
    assert of_columns(x.contiguous())[0][1:3].tolist() == [[LEVELS], [-LEVELS]]
