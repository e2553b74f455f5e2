import pytest
import torch

from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.packing import BITS
from tests import references
from tests.ops.triton.test_int8 import alike
from tests.ops.triton.test_quantize import activation

CASES = [*((None, bits, 40) for bits in BITS), *((f, 5, 70) for f in FUNCTIONS), ("gelu", 2, 3)]


@pytest.fixture
def kernels(interpreted):
    from razorctl.ops.triton import int8_operand

    return interpreted(int8_operand)


@pytest.mark.parametrize(("function", "bits", "tile_rows"), CASES)
def test_int8_operand(function, bits, tile_rows, kernels):
    copy = references.quantize(activation(70, 192), bits, tile_rows)
    scale = copy.scale * (torch.rand_like(copy.scale) - 0.3)  # a weight of either sign is folded in
    copy = copy._replace(scale=scale, bias=torch.randn(192) if bits % 2 else None)
    args = copy, torch.rand(70, 1), function
    got, want = kernels.int8_operand(*args), references.int8_operand(*args)
    assert got[0].is_contiguous()
    alike(got[0], want[0])
    torch.testing.assert_close(got[1:], want[1:], rtol=1e-5, atol=1e-5)


def test_int8_operand_of_a_gradient_of_zeros(kernels):
    copy = references.quantize(activation(5, 64), 4, 5)
    codes, scale, _ = kernels.int8_operand(copy, torch.zeros(5, 1), None)
    assert not codes.any()
    assert not scale.any()
