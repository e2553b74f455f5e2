import pytest
import torch

from razorctl.ops.functions import FUNCTIONS, applied
from razorctl.ops.gemm import COPY_ROWS
from razorctl.ops.int8 import LEVELS, int8_rows
from razorctl.ops.linear_again import BITS as CODE_BITS
from razorctl.ops.linear_again import linear_again, linear_copy_again, row_operand
from razorctl.ops.op import FewBitCopy
from razorctl.ops.quantize import dequantize
from tests.references import copied

SHAPES = [(50, 7, 50), (44, 3, 5), (70, 64, 40)]  # rows, columns, rows of a tile


def form(rows, columns, tile_rows, bits, function, device="cpu"):
    """Of a copy that a norm offers, whose weight may turn a column round."""
    copy = copied(3 * torch.randn(rows, columns, device=device), bits, tile_rows)
    scale = copy.scale * torch.randn(columns, device=device)
    bias = torch.randn(columns, device=device)
    return copy._replace(scale=scale, bias=bias), rows, function


@pytest.mark.parametrize("function", [None, *FUNCTIONS])
@pytest.mark.parametrize("bits", [8, 3])
@pytest.mark.parametrize(("rows", "columns", "tile_rows"), SHAPES)
def test_the_operand_is_that_of_the_values(
    rows, columns, tile_rows, bits, function, device, monkeypatch
):
    args = form(rows, columns, tile_rows, bits, function, device)
    want = int8_rows(applied(function, dequantize(args[0], rows, torch.float32)))
    monkeypatch.setattr("razorctl.ops.chunks.CACHED", {"cpu": 130})
    codes, scale = row_operand(*args)
    assert codes.dtype == torch.int8
    assert (codes.int() - want[0].int()).abs().max() <= 1  # an ulp may decide which way it rounds
    assert (codes.abs().amax(1) == LEVELS * (scale > 0).squeeze(1)).all()
    torch.testing.assert_close(scale, want[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [None, "gelu"])
@pytest.mark.parametrize("affine", [True, False])
def test_the_output(affine, function, dtype, device):
    copy, rows, _ = form(70, 64, 40, 5, function, device)
    weight = torch.randn(64, 24, device=device).t()  # not contiguous, as that of a Conv1D
    bias = 3 * torch.randn(24, device=device).to(dtype) if affine else None
    got = linear_again(copy, rows, function, weight, bias, dtype)
    x = applied(function, dequantize(copy, rows, torch.float32)).double()
    want = x @ weight.t().double() + (0 if bias is None else bias.double())
    assert got.dtype == dtype
    assert (got - want).norm() < 0.02 * want.norm()


def test_a_large_column_leaves_the_others_their_codes(device):
    x = torch.randn(70, 64, device=device)
    x[:, 3] = 300 + 100 * x[:, 3]
    copy, weight = copied(x, 8, 40), torch.randn(24, 64, device=device)
    weight[:, 3] /= 100
    got = linear_again(copy, 70, None, weight, None, torch.float32)
    want = dequantize(copy, 70, torch.float32) @ weight.t()
    assert (got - want).norm() < 0.25 * want.norm()  # .65 by rows of x itself


@pytest.mark.parametrize("outputs", [64, 24])
def test_the_copy_is_that_of_the_output(outputs, device, monkeypatch):
    monkeypatch.setattr("razorctl.ops.gemm.PART", 40 * outputs)
    monkeypatch.setattr("razorctl.ops.cpu.linear_again.ELEMENTS", 40 * outputs)
    args = form(2 * COPY_ROWS + 70, 64, 40, 5, None, device)
    weight, bias = torch.randn(outputs, 64, device=device), 3 * torch.randn(outputs, device=device)
    y = linear_again(*args, weight, bias, torch.float32)
    got = FewBitCopy(*linear_copy_again(*args, weight, bias, torch.float16), CODE_BITS, COPY_ROWS)
    want = copied(y, CODE_BITS, COPY_ROWS)
    assert [t.shape for t in got[:3]] == [t.shape for t in want[:3]]
    torch.testing.assert_close(got.scale, want.scale)
    step = want.scale.float().repeat_interleave(COPY_ROWS, 0)[: len(y)]
    assert ((dequantize(got, len(y), y.dtype) - y).abs() <= 0.51 * step).all()
    large = linear_copy_again(*args, weight, bias.half() + 6e4, torch.float16)
    values = dequantize(
        got._replace(packed=large[0], zero_point=large[1], scale=large[2]), len(y), torch.float16
    )
    assert values.isfinite().all()


def test_degenerate_inputs(device):
    zero = copied(torch.zeros(6, 64, device=device), 4, 4)
    weight, bias = torch.randn(3, 64, device=device), torch.randn(3, device=device)
    got = linear_again(zero, 6, None, weight, bias, torch.float32)
    torch.testing.assert_close(got, bias.expand(6, 3))
    empty = copied(torch.empty(0, 3, device=device), 4, 4)
    nothing = empty, 0, None, weight[:, :3], bias, torch.float32
    assert linear_again(*nothing).shape == (0, 3)
    assert [t.shape for t in linear_copy_again(*nothing)] == [(0,), (0, 3), (0, 3)]
    scale = zero.scale.clone()
    scale[0, 1] = torch.nan  # the weight of a norm, in a model that has diverged
    args = zero._replace(scale=scale), 6, None, weight, bias, torch.float32
    assert linear_again(*args).isnan().sum() == 4 * 3
