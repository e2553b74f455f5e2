import pytest
import torch
from torch import Tensor

from razorctl.ops.functions import FUNCTIONS, applied
from razorctl.ops.int8 import LEVELS
from razorctl.ops.int8_operand import int8_operand
from razorctl.ops.op import FewBitCopy
from razorctl.ops.quantize import dequantize
from tests import references
from tests.references import copied

every_function = pytest.mark.parametrize("function", [None, *FUNCTIONS])
SHAPES = [(50, 7, 50), (44, 3, 5), (70, 64, 40)]  # rows, columns, rows of a tile


def arguments(
    x: Tensor, bits: int, tile_rows: int, bias: bool, function: str | None
) -> tuple[object, ...]:
    rows, columns = x.shape
    row_scale = torch.rand(rows, 1, device=x.device) + 0.01
    copy = copied(x, bits, tile_rows)
    if bias:  # of a norm, whose weight may turn a column round
        scale = copy.scale * torch.randn(columns, device=x.device)
        copy = copy._replace(scale=scale, bias=torch.randn(columns, device=x.device))
    return copy, row_scale, function


def exact(copy: FewBitCopy, row_scale: Tensor, function: str | None) -> Tensor:
    """The rows times their scales."""
    values = dequantize(copy, len(row_scale), torch.float32)
    return row_scale * applied(function, values)


@every_function
@pytest.mark.parametrize("bits", [8, 3])
@pytest.mark.parametrize(("rows", "columns", "tile_rows"), SHAPES)
def test_it_is_within_half_a_scale(rows, columns, tile_rows, bits, function, device, monkeypatch):
    x = 3 * torch.randn(rows, columns, device=device)
    args = arguments(x, bits, tile_rows, bias=function is None, function=function)
    want = references.int8_operand(*args)
    monkeypatch.setattr("razorctl.ops.chunks.CACHED", {"cpu": 130})
    codes, scale, center = int8_operand(*args)
    assert codes.dtype == torch.int8
    assert codes.abs().max() <= LEVELS
    assert (codes.int() - want[0].int()).abs().max() <= 1  # an ulp may decide which way it rounds
    torch.testing.assert_close((scale, center), want[1:])
    got = codes.T * scale + args[-2] * center
    assert (got - exact(*args)).abs().le(0.51 * scale + 1e-6).all()


@pytest.mark.parametrize("function", [None, "gelu"])
def test_the_scale_is_no_larger_than_the_codes_need(function, device):
    x = torch.cat([torch.linspace(-4, 4, 33), torch.linspace(0.1, 0.2, 33)]).view(2, 33).T
    args = arguments(x.to(device), 4, 100, False, function)
    row_scale = args[-2].fill_(2.0)
    codes, scale, center = int8_operand(*args)
    values = exact(*args) - row_scale * center
    torch.testing.assert_close(scale * LEVELS, values.abs().amax(0), rtol=1e-2, atol=0)
    assert (codes.abs().amax(1) == LEVELS).all()
    if function is None:  # around the middle of what the codes reach
        torch.testing.assert_close(values.amax(0), -values.amin(0), rtol=1e-2, atol=0)


@every_function
def test_degenerate_inputs(function, device):
    for value in (0.0, 1e30, -1e30, 1e-30):
        x = torch.full((12, 3), value, device=device)
        args = arguments(x, 4, 6, False, function)
        codes, scale, center = int8_operand(*args)
        assert scale.isfinite().all()
        got = codes.T * scale + args[-2] * center
        x = x[:, :1]
        want = args[-2] * applied(function, x)
        assert ((got - want).abs() <= 0.51 * scale + 2**-13 * want.abs() + 1e-6).all()
    args = arguments(torch.ones(4, 3, device=device), 4, 4, False, function)
    args[-2].zero_()  # of rows without a gradient
    codes, scale, _ = int8_operand(*args)
    assert not codes.any()
    assert not scale.any()
    empty = arguments(torch.empty(0, 3, device=device), 4, 6, False, function)
    assert [t.shape for t in int8_operand(*empty)] == [(3, 0), (3,), (3,)]
