import pytest
import torch

from razorctl.ops.int8 import (
    adjoined,
)
from tests import references
from tests.ops.triton.test_quantize import TYPES, activation

SHAPES = [(1, 1), (33, 64), (70, 100)]


@pytest.fixture
def kernels(interpreted):
    from razorctl.ops.triton import int8

    return interpreted(int8)


def alike(got: torch.Tensor, want: torch.Tensor) -> None:
    """Codes are equal, but for a few that a product rounds elsewhere."""
    apart = (got.int() - want.int()).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 2e-3


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_int8_rows(rows, columns, dtype, kernels):
    x = activation(rows, columns, dtype)
    x[rows // 2] = 0
    got, want = kernels.int8_rows(x), references.int8_rows(x)
    alike(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
    exact, most = x.double().sum(0), x.double().abs().sum(0)
    assert ((got[2] - exact).abs() <= 1e-6 * most).all()
    torch.testing.assert_close(got[3], want[3])


def test_int8_rows_of_what_is_not_finite(kernels):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, inf, -inf], [2.0, nan, 3.0]])
    codes, scale, total, largest = kernels.int8_rows(x)
    assert codes[0].tolist() == [0, 127, -127]
    assert scale[0].item() == pytest.approx(torch.finfo(torch.float32).max / 127)
    assert scale[1].isnan()
    assert total.isfinite().tolist() == [True, False, False]
    assert largest.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("joint", [True, False])
def test_int8_heads(joint, dtype, kernels):
    shape = (2, 7, 3, 3, 24) if joint else (3, 2, 3, 7, 24)
    x = activation(2 * 7, 3 * 3 * 24, dtype).reshape(shape)
    q, k, v = (x.permute(2, 0, 3, 1, 4) if joint else x).unbind(0)
    got, want = kernels.int8_heads(q, k, v), references.int8_rows(adjoined(q, k, v))
    alike(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
    torch.testing.assert_close(got[2:], want[2:], rtol=1e-5, atol=1e-4)


def test_int8_heads_takes_what_a_thread_can_load(kernels):
    q = torch.randn(2, 3, 7, 24)
    assert kernels.takes_heads(q, q, q)
    assert not kernels.takes_heads(q, q, q.transpose(1, 2).contiguous().transpose(1, 2))
    narrow = torch.randn(2, 3, 7, 25)[..., :24]  # a row starts where no vector does
    assert not kernels.takes_heads(narrow, narrow, narrow)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "columns"), [*SHAPES, (2100, 3)])
def test_int8_columns(rows, columns, dtype, kernels):
    x = activation(rows, columns, dtype)
    x[:, columns // 2] = 0
    got, want = kernels.int8_columns(x), references.int8_columns(x)
    assert got[0].is_contiguous()
    alike(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
