import pytest
import torch

from razorctl.ops.functions import FUNCTIONS, applied
from razorctl.ops.int8 import LEVELS, int8_rows
from razorctl.ops.int8_row_operand import int8_row_operand
from razorctl.ops.packing import BITS
from razorctl.ops.quantize import dequantize
from tests.references import copied, opcheck

SHAPES = [(50, 7, 50), (44, 3, 5), (70, 64, 40)]  # rows, columns, rows of a tile


def arguments(rows, columns, tile_rows, bits, function, device="cpu"):
    """Of a copy that a norm offers, whose weight may turn a column round."""
    copy = copied(3 * torch.randn(rows, columns, device=device), bits, tile_rows)
    scale = copy.scale * torch.randn(columns, device=device)
    bias = torch.randn(columns, device=device)
    return copy._replace(scale=scale, bias=bias), rows, function


@pytest.mark.parametrize("function", [None, *FUNCTIONS])
@pytest.mark.parametrize("bits", [8, 3])
@pytest.mark.parametrize(("rows", "columns", "tile_rows"), SHAPES)
def test_it_is_that_of_the_values(rows, columns, tile_rows, bits, function, device, monkeypatch):
    args = arguments(rows, columns, tile_rows, bits, function, device)
    want = int8_rows(applied(function, dequantize(args[0], rows, torch.float32)))
    monkeypatch.setattr("razorctl.ops.chunks.CACHED", {"cpu": 130})
    codes, scale = int8_row_operand(*args)
    assert codes.dtype == torch.int8
    assert (codes.int() - want[0].int()).abs().max() <= 1  # an ulp may decide which way it rounds
    assert (codes.abs().amax(1) == LEVELS * (scale > 0).squeeze(1)).all()
    torch.testing.assert_close(scale, want[1])


def test_degenerate_inputs(device):
    zero = copied(torch.zeros(6, 64, device=device), 4, 4)
    assert not any(t.any() for t in int8_row_operand(zero, 6, None))
    empty = copied(torch.empty(0, 3, device=device), 4, 4)
    assert [t.shape for t in int8_row_operand(empty, 0, None)] == [(0, 3), (0, 1)]
    scale = zero.scale.clone()
    scale[0, 1] = torch.nan  # the weight of a norm, in a model that has diverged
    assert int8_row_operand(zero._replace(scale=scale), 6, None)[1].isnan().sum() == 4


@pytest.mark.parametrize("bits", BITS)
def test_registration(bits):
    for function in (None, "gelu"):
        opcheck(int8_row_operand, arguments(18, 5, 7, bits, function))
