import pytest
import torch

from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.int8_row_operand import int8_row_operand
from razorctl.ops.packing import BITS
from tests import references
from tests.ops.triton.test_int8 import alike
from tests.ops.triton.test_quantize import activation

CASES = [*((None, bits, 40) for bits in BITS), *((f, 5, 70) for f in FUNCTIONS), ("gelu", 2, 3)]


@pytest.fixture
def kernels(interpreted):
    from razorctl.ops.triton import int8_row_operand

    return interpreted(int8_row_operand)


@pytest.mark.parametrize(("function", "bits", "tile_rows"), CASES)
def test_int8_row_operand(function, bits, tile_rows, kernels):
    copy = references.quantize(activation(70, 192), bits, tile_rows)
    scale = copy.scale * (torch.rand_like(copy.scale) - 0.3)  # a weight of either sign is folded in
    copy = copy._replace(scale=scale, bias=torch.randn(192) if bits % 2 else None)
    got = kernels.int8_row_operand(copy, 70, function)
    want = int8_row_operand.body(copy, 70, function)
    alike(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
