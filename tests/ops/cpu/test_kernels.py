"""Kernels against the PyTorch bodies of their ops; tests/ops compares both with references."""

import copy
import math

import pytest
import torch

from razorctl.ops.activation import activation_grad
from razorctl.ops.cpu import library
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.images import quantize_images
from razorctl.ops.int8 import int8_rows
from razorctl.ops.op import FewBitCopy
from razorctl.ops.quantize import dequantize, quantize
from tests.ops.calls import CALLS, Size, assert_agree, op_of

pytestmark = pytest.mark.skipif(library.library() is None, reason=library.state())
KERNELS = [name for name in CALLS if "cpu" in op_of(name).kernels]
# Whole strips, strips in parts, more codes than a task owns; one tile, and a short last one. Rows
# that are packed as one line: of few columns, and of more than a task owns.
SIZES = [
    Size(70, 128, 70, 8),
    Size(150, 1536, 64, 2, torch.bfloat16, "silu"),
    Size(33, 4416, 16, 4, function="quick-gelu"),
    Size(70, 3, 16, 6, torch.bfloat16, "relu6"),
    Size(50, 2100, 20, 5),
    Size(2, 9, 1, 3, function="gelu-tanh"),
]
OF_FUNCTIONS = ("activation_quantize", "dequantize_images", "gated_grad", "int8_operand")
OF_FUNCTIONS += ("linear_again", "linear_weight_grad")


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_agrees_with_the_body(name, size):
    for args in CALLS[name](size):
        twin = copy.deepcopy(args)  # a draw moves its phase
        assert_agree(name, op_of(name)(*args), op_of(name).body(*twin), size)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_every_function(name, function):
    size = Size(70, 130, 16, function=function)
    for args in CALLS[name](size):
        assert_agree(name, op_of(name)(*args), op_of(name).body(*args), size)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_slopes_are_right_to_2e_6_for_every_argument(function):
    x = torch.linspace(-40, 40, 64 * 4000).view(-1, 64).contiguous()
    packed = torch.zeros(len(x) * 64, dtype=torch.uint8)  # each row is a tile of the code 0
    zero_point, scale = torch.full(x.shape, -8, dtype=torch.int16), x
    dy = torch.ones_like(x)
    got = activation_grad(dy, FewBitCopy(packed, zero_point, scale, 8, 1), function)
    exact = FUNCTIONS[function].backward(dy.double(), x.double()).float()
    assert (got - exact).abs().max() <= 2e-6


@pytest.mark.parametrize("bits", [2, 4])
def test_no_value_is_beyond_a_kernel(bits):
    x = torch.randn(40, 64)
    x[3, 1], x[5, 2], x[6, 3], x[:, 4], x[:, 5] = math.nan, math.inf, -math.inf, 0, 3e-40
    got = quantize(x, bits, 40)
    torch.testing.assert_close(got[1:], quantize.body(x, bits, 40)[1:])
    assert dequantize(FewBitCopy(*got, bits, 40), 40, torch.float32).isfinite().all()
    images = x.T.reshape(1, 64, 40)
    got, want = (run(images, bits, 32) for run in (quantize_images, quantize_images.body))
    torch.testing.assert_close(got[1:], want[1:])
    (codes, scale, *_), want = int8_rows(x), int8_rows.body(x)
    torch.testing.assert_close(scale, want[1], equal_nan=True)
    assert scale[3].isnan()
    finite = x.isfinite().all(1)
    assert torch.equal(codes[finite], want[0][finite])
