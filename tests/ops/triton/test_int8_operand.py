import pytest
import torch

from razorctl.ops.activation import FUNCTIONS
from razorctl.ops.int8_operand import int8_operand_reference
from razorctl.ops.packing import BITS
from razorctl.ops.quantize import quantize_reference
from tests.ops.triton.test_int8 import alike
from tests.ops.triton.test_quantize import activation

CASES = [*((None, bits, 40) for bits in BITS), *((f, 5, 70) for f in FUNCTIONS), ("gelu", 2, 3)]


@pytest.fixture
def kernels(interpreted):
    from razorctl.ops.triton import int8_operand

    return interpreted(int8_operand)


@pytest.mark.parametrize(("function", "bits", "tile_rows"), CASES)
def test_int8_operand(function, bits, tile_rows, kernels):
    packed, zero_point, scale = quantize_reference(activation(70, 192), bits, tile_rows)
    scale = scale * (torch.rand_like(scale) - 0.3)  # a weight of either sign is folded in
    bias = torch.randn(192) if bits % 2 else None
    copy = packed, zero_point, scale, bias, bits, tile_rows, torch.rand(70, 1), function
    got, want = kernels.int8_operand(*copy), int8_operand_reference(*copy)
    assert got[0].is_contiguous()
    alike(got[0], want[0])
    torch.testing.assert_close(got[1:], want[1:], rtol=1e-5, atol=1e-5)


def test_int8_operand_of_a_gradient_of_zeros(kernels):
    copy = *quantize_reference(activation(5, 64), 4, 5), None, 4, 5, torch.zeros(5, 1), None
    codes, scale, _ = kernels.int8_operand(*copy)
    assert not codes.any()
    assert not scale.any()
