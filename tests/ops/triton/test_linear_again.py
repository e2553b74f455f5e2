import pytest
import torch

from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.linear_again import evened, row_operand
from razorctl.ops.packing import BITS
from tests import references
from tests.ops.triton.test_int8 import alike
from tests.ops.triton.test_quantize import activation

CASES = [*((None, bits, 40) for bits in BITS), *((f, 5, 70) for f in FUNCTIONS), ("gelu", 2, 3)]


@pytest.fixture
def kernels(interpreted):
    from razorctl.ops.triton import linear_again

    return interpreted(linear_again)


@pytest.mark.parametrize(("function", "bits", "tile_rows"), CASES)
def test_row_operands(function, bits, tile_rows, kernels):
    copy = references.quantize(activation(70, 192), bits, tile_rows)
    scale = copy.scale * (torch.rand_like(copy.scale) - 0.3)  # a weight of either sign is folded in
    copy = copy._replace(scale=scale, bias=torch.randn(192) if bits % 2 else None)
    weight = activation(9, 200)[:, :192]
    got = kernels.row_operands(copy, 70, function, weight if bits % 2 else weight.t().clone().t())
    copy, weight = evened(copy, function, weight)
    for codes, each, want in (
        (*got[:2], row_operand(copy, 70, function)),
        (*got[2:], references.int8_rows(weight)),
    ):
        alike(codes, want[0])
        torch.testing.assert_close(each, want[1].view(each.shape))
