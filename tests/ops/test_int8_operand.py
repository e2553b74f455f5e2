import pytest
import torch
from torch import Tensor

from razorctl.ops.activation import FUNCTIONS
from razorctl.ops.int8 import LEVELS
from razorctl.ops.int8_operand import int8_operand, int8_operand_reference
from razorctl.ops.packing import BITS
from razorctl.ops.quantize import dequantize, quantize

every_function = pytest.mark.parametrize("function", [None, *FUNCTIONS])
SHAPES = [(1, 50, 7), (9, 5, 3), (2, 40, 64)]


def arguments(x: Tensor, bits: int, bias: bool, function: str | None) -> tuple[object, ...]:
    blocks, rows, columns = x.shape
    row_scale = torch.rand(blocks * rows, 1, device=x.device) + 0.01
    packed, zero_point, scale = quantize(x, bits)
    added = None
    if bias:  # of a norm, whose weight may turn a column round
        scale = scale * torch.randn(columns, device=x.device)
        added = torch.randn(columns, device=x.device)
    return packed, zero_point, scale, added, bits, row_scale, function


def exact(x: Tensor, packed: Tensor, zero_point: Tensor, scale: Tensor, *rest: object) -> Tensor:
    """The rows times their scales."""
    bias, bits, row_scale, function = rest
    values = dequantize(packed, zero_point, scale, bias, bits, x.shape[1], torch.float32)
    values = values.flatten(0, 1)
    return row_scale * (values if function is None else FUNCTIONS[function].forward(values))


@every_function
@pytest.mark.parametrize("bits", [8, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_within_half_a_scale(shape, bits, function, device, monkeypatch):
    x = 3 * torch.randn(shape, device=device)
    args = arguments(x, bits, bias=function is None, function=function)
    want = int8_operand_reference(*args)
    monkeypatch.setattr("razorctl.ops.chunks.CACHED", {"cpu": 130})
    codes, scale, center = int8_operand(*args)
    assert codes.dtype == torch.int8
    assert codes.abs().max() <= LEVELS
    assert (codes.int() - want[0].int()).abs().max() <= 1  # an ulp may decide which way it rounds
    torch.testing.assert_close((scale, center), want[1:])
    got = codes.T * scale + args[-2] * center
    assert (got - exact(x, *args)).abs().le(0.51 * scale + 1e-6).all()


@pytest.mark.parametrize("function", [None, "gelu"])
def test_the_scale_is_no_larger_than_the_codes_need(function, device):
    x = torch.cat([torch.linspace(-4, 4, 33), torch.linspace(0.1, 0.2, 33)]).view(2, 33).T
    args = arguments(x[None].to(device), 4, False, function)
    row_scale = args[-2].fill_(2.0)
    codes, scale, center = int8_operand(*args)
    values = exact(x[None], *args) - row_scale * center
    torch.testing.assert_close(scale * LEVELS, values.abs().amax(0), rtol=1e-2, atol=0)
    assert (codes.abs().amax(1) == LEVELS).all()
    if function is None:  # around the middle of what the codes reach
        torch.testing.assert_close(values.amax(0), -values.amin(0), rtol=1e-2, atol=0)


@every_function
def test_degenerate_inputs(function, device):
    for value in (0.0, 1e30, -1e30, 1e-30):
        x = torch.full((2, 6, 3), value, device=device)
        args = arguments(x, 4, False, function)
        codes, scale, center = int8_operand(*args)
        assert scale.isfinite().all()
        got = codes.T * scale + args[-2] * center
        want = args[-2] * (value if function is None else max(0.0, value))
        assert ((got - want).abs() <= 0.51 * scale + 2**-13 * want.abs() + 1e-6).all()
    args = arguments(torch.ones(1, 4, 3, device=device), 4, False, function)
    args[-2].zero_()  # of rows without a gradient
    codes, scale, _ = int8_operand(*args)
    assert not codes.any()
    assert not scale.any()
    empty = arguments(torch.empty(2, 0, 3, device=device), 4, False, function)
    assert [t.shape for t in int8_operand(*empty)] == [(3, 0), (3,), (3,)]


@pytest.mark.parametrize("bits", BITS)
def test_registration(bits):
    for function, bias in ((None, True), ("gelu", False)):
        args = arguments(torch.randn(2, 9, 5), bits, bias, function)
        torch.library.opcheck(int8_operand, args)
