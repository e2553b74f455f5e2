"""Kernels against the PyTorch bodies of their ops; tests/ops compares both with references."""

import math

import pytest
import torch

from razorctl.ops.activation import activation_grad, activation_grad_int8
from razorctl.ops.batch_norm import batch_norm_grad
from razorctl.ops.cpu import library
from razorctl.ops.cpu import linear_again as kernels
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.gated import gated_grad
from razorctl.ops.gemm import scaled_gemm
from razorctl.ops.images import dequantize_images, quantize_images
from razorctl.ops.int8 import adjoined, int8_columns, int8_heads, int8_rows
from razorctl.ops.int8_operand import int8_operand
from razorctl.ops.linear_again import linear_again, linear_copy_again, row_operand
from razorctl.ops.norm import norm_grad, norm_grad_int8, norm_quantize
from razorctl.ops.norm_again import norm_again
from razorctl.ops.op import FewBitCopy
from razorctl.ops.packing import BITS, unpack
from razorctl.ops.pool import max_pool, max_pool_grad
from razorctl.ops.quantize import dequantize, quantize
from razorctl.ops.slopes import slope_bits, slope_grad
from razorctl.ops.topk import topk_pack, topk_unpack
from tests.ops.test_norm_again import arguments as of_norm_again
from tests.references import copied

pytestmark = pytest.mark.skipif(library.library() is None, reason=library.state())
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# Whole strips, strips in parts, more codes than a task owns; one tile, and a short last one.
shapes = pytest.mark.parametrize(
    ("rows", "columns", "tile_rows"), [(70, 128, 70), (150, 1536, 64), (33, 4416, 16)]
)

# The same, and rows that are packed as one line: of few columns, and of more than a task owns.
widths = pytest.mark.parametrize(
    ("rows", "columns", "tile_rows"),
    [(70, 128, 70), (150, 1536, 64), (33, 4416, 16), (70, 3, 16), (50, 2100, 20)],
)
# One channel, whole strips and one line; tiles within an image and across several.
images = pytest.mark.parametrize(
    ("shape", "tile_rows"),
    [((3, 1, 5, 5), 16), ((2, 64, 17, 9), 256), ((7, 320, 3, 5), 40), ((2, 300, 9, 4), 50)],
)


def body(op):
    """The PyTorch body of an op."""
    return op.body


@pytest.fixture(autouse=True, params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def strided(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Values with a spread of sizes, in rows that lie apart."""
    x = torch.randn(rows, columns + 5) * torch.logspace(-2, 1, columns + 5)
    return x.to(dtype)[:, :columns]


@widths
@dtypes
@pytest.mark.parametrize("bits", BITS)
def test_quantize(bits, dtype, rows, columns, tile_rows):
    x = strided(rows, columns, dtype)
    got, want = quantize(x, bits, tile_rows), body(quantize)(x, bits, tile_rows)
    codes = [unpack(t[0], bits, rows, columns).int() for t in (got, want)]
    differ = codes[0] != codes[1]
    assert (codes[0] - codes[1]).abs().max() <= 1
    assert differ.float().mean() < 1e-3  # on a boundary, by the order of a sum or of roundings
    torch.testing.assert_close(got[1], want[1], rtol=0, atol=0 if bits > 2 else 1)
    torch.testing.assert_close(got[2], want[2])


@dtypes
def test_quantize_rounds_at_random_and_normalizes(dtype):
    x, seed = strided(70, 192, dtype), torch.tensor(7)
    mean = x.float().mean(1, keepdim=True)
    rstd = 1 / x.float().std(1, keepdim=True)
    for arguments in [(mean, rstd), (None, rstd), (None, None, seed), (mean, rstd, seed)]:
        got, want = (run(x, 4, 32, *arguments) for run in (quantize, body(quantize)))
        codes = [unpack(t[0], 4, 70, 192).int() for t in (got, want)]
        assert (codes[0] != codes[1]).float().mean() < 1e-3
        torch.testing.assert_close(got[2], want[2])


@pytest.mark.parametrize("bits", [2, 4])
def test_no_value_is_beyond_a_kernel(bits):
    x = torch.randn(40, 64)
    x[3, 1], x[5, 2], x[6, 3], x[:, 4], x[:, 5] = math.nan, math.inf, -math.inf, 0, 3e-40
    got, want = quantize(x, bits, 40), body(quantize)(x, bits, 40)
    torch.testing.assert_close(got[1:], want[1:])
    assert dequantize(FewBitCopy(*got, bits, 40), 40, torch.float32).isfinite().all()
    codes, scale, *_ = int8_rows(x)
    want = body(int8_rows)(x)
    torch.testing.assert_close(scale, want[1], equal_nan=True)
    assert scale[3].isnan()
    finite = x.isfinite().all(1)
    assert torch.equal(codes[finite], want[0][finite])


@widths
@dtypes
@pytest.mark.parametrize("bits", BITS)
def test_dequantize(bits, dtype, rows, columns, tile_rows):
    copy = copied(strided(rows, columns, dtype), bits, tile_rows)
    arguments = copy._replace(bias=torch.randn(columns)), rows, dtype
    torch.testing.assert_close(dequantize(*arguments), body(dequantize)(*arguments))


@widths
@dtypes
@pytest.mark.parametrize("form", ["of x_hat", "of x", "scaled"])
def test_norm_again(form, dtype, rows, columns, tile_rows):
    args, _ = of_norm_again(rows, columns, tile_rows, form, dtype)
    got, want = norm_again(*args), body(norm_again)(*args)
    assert (got[0].int() - want[0].int()).abs().max() <= 1
    assert (got[0] != want[0]).float().mean() < 1e-3
    torch.testing.assert_close(got[2], want[2], rtol=2**-7, atol=0)
    same = got[2] == want[2]
    # A tile of one row has a step so small that its zero point is large, and so rounded.
    assert ((got[1] - want[1]).abs() <= 1 + want[1].abs() * 2**-11)[same].all()
    assert same.float().mean() > 0.99


@pytest.mark.parametrize("function", FUNCTIONS)
def test_slopes_are_right_to_2e_6_for_every_argument(function):
    x = torch.linspace(-40, 40, 64 * 4000).view(-1, 64).contiguous()
    packed = torch.zeros(len(x) * 64, dtype=torch.uint8)  # each row is a tile of the code 0
    zero_point, scale = torch.full(x.shape, -8, dtype=torch.int16), x
    dy = torch.ones_like(x)
    got = activation_grad(dy, FewBitCopy(packed, zero_point, scale, 8, 1), function)
    exact = FUNCTIONS[function].backward(dy.double(), x.double()).float()
    assert (got - exact).abs().max() <= 2e-6


@shapes
@dtypes
def test_int8_copies(dtype, rows, columns, tile_rows):
    x = strided(rows, columns, dtype)
    factor = torch.rand(rows, 1)
    largest = (2 * x.float() * factor).abs().amax(0)
    columns = (x,), (x, factor), (x, factor, largest)
    for op, *args in ((int8_rows, x), *((int8_columns, *args) for args in columns)):
        got, want = op(*args), body(op)(*args)
        assert got[0].stride() == want[0].stride()
        assert (got[0].int() - want[0].int()).abs().max() <= 1
        assert (got[0] != want[0]).float().mean() < 1e-3
        torch.testing.assert_close(got[1:], want[1:], rtol=1e-5, atol=1e-4)


@shapes
@pytest.mark.parametrize("function", [None, *FUNCTIONS])
def test_int8_operand(function, rows, columns, tile_rows):
    copy = copied(strided(rows, columns, torch.float32), 5, tile_rows)
    arguments = copy._replace(bias=torch.randn(columns)), torch.rand(rows, 1), function
    got, want = int8_operand(*arguments), body(int8_operand)(*arguments)
    assert (got[0].int() - want[0].int()).abs().max() <= 1
    assert (got[0] != want[0]).float().mean() < 2e-3
    torch.testing.assert_close(got[1:], want[1:])


@widths
@pytest.mark.parametrize("function", [None, "gelu"])
def test_linear_again(function, rows, columns, tile_rows):
    copy = copied(strided(rows, columns, torch.float32), 5, tile_rows)
    copy = copy._replace(bias=torch.randn(columns))
    got, want = kernels.row_operand(copy, rows, function), row_operand(copy, rows, function)
    assert (got[0].int() - want[0].int()).abs().max() <= 1
    assert (got[0] != want[0]).float().mean() < 2e-3
    torch.testing.assert_close(got[1], want[1])
    arguments = copy, rows, function, torch.randn(7, columns), torch.randn(7), torch.bfloat16
    close = (linear_again(*arguments) - body(linear_again)(*arguments)).norm()
    assert close < 1e-2 * linear_again(*arguments).norm()
    got, want = linear_copy_again(*arguments), body(linear_copy_again)(*arguments)
    assert (got[0].int() - want[0].int()).abs().max() <= 1
    assert (got[0] != want[0]).float().mean() < 2e-2  # where operands differ
    torch.testing.assert_close(got[2], want[2], rtol=1e-2, atol=0)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("rows", "columns"), [(70, 3), (33, 4416)])
def test_gated_grad(rows, columns, function):
    arguments = *(3 * torch.randn(3, rows, columns + 5))[..., :columns], function
    got, want = gated_grad(*arguments), body(gated_grad)(*arguments)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=3e-4)  # of magnitudes up to 100


@dtypes
@pytest.mark.parametrize("scaled", [True, False])
def test_scaled_gemm(scaled, dtype):
    a, b = (torch.randint(-127, 128, (n, 96), dtype=torch.int8) for n in (70, 2100))
    a_scale, outer = (
        (torch.rand(70, 1), (torch.randn(70), torch.randn(2100))) if scaled else (None, ())
    )
    arguments = a, b, a_scale, torch.rand(2100), dtype, *outer
    torch.testing.assert_close(scaled_gemm(*arguments), body(scaled_gemm)(*arguments))


@shapes
@dtypes
@pytest.mark.parametrize("centers", [True, False])
def test_norm_grad(centers, dtype, rows, columns, tile_rows):
    copy = copied(strided(rows, columns, torch.float32), 4, tile_rows)
    dy, rstd = strided(rows, columns, dtype), torch.rand(rows, 1)
    for weight, residual in [(None, None), (torch.randn(columns), strided(rows, columns, dtype))]:
        arguments = dy, copy, weight, rstd, centers, residual
        got, want = norm_grad(*arguments), body(norm_grad)(*arguments)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


@dtypes
@pytest.mark.parametrize("centers", [True, False])
def test_norm_quantize(centers, dtype):
    weight = torch.randn(192).to(dtype)
    arguments = strided(70, 192, dtype), weight, None, 1e-6, centers, 4, 32, dtype
    got, want = norm_quantize(*arguments), body(norm_quantize)(*arguments)
    torch.testing.assert_close(got[:2], want[:2])
    torch.testing.assert_close(got[4], want[4])
    codes = [unpack(t[2], 4, 70, 192) for t in (got, want)]
    assert (codes[0] != codes[1]).float().mean() < 1e-3


@dtypes
def test_gradients_with_their_int8_copy(dtype):
    copy = copied(strided(70, 192, torch.float32), 4, 32)
    dy, rstd = strided(70, 192, dtype), torch.rand(70, 1)
    for got, want in [
        (
            norm_grad_int8(dy, copy, None, rstd, True),
            norm_grad(dy, copy, None, rstd, True),
        ),
        (
            activation_grad_int8(dy, copy, "gelu"),
            (activation_grad(dy, copy, "gelu"),),
        ),
    ]:
        torch.testing.assert_close(got[:-4], want[: len(got) - 4], rtol=0, atol=0)
        torch.testing.assert_close(got[-4:], int8_rows(want[0]), rtol=0, atol=0)


@dtypes
def test_int8_heads(dtype):
    # As views of a joint output, and as fused attention returns them.
    views = torch.randn(2, 35, 3, 4, 16).to(dtype).permute(2, 0, 3, 1, 4).unbind(0)
    apart = torch.randn(3, 2, 4, 35, 16).to(dtype).unbind(0)
    for q, k, v in (views, apart, (views[0], *apart[1:])):
        got, want = int8_heads(q, k, v), int8_rows(adjoined(q, k, v))
        torch.testing.assert_close(got[:2], want[:2], rtol=0, atol=0)
        torch.testing.assert_close(got[2], want[2], rtol=1e-4, atol=1e-4)


@images
@dtypes
@pytest.mark.parametrize("bits", BITS)
def test_images(bits, dtype, shape, tile_rows):
    x = (torch.randn(shape) * torch.logspace(-2, 1, shape[1])[:, None, None]).to(dtype)
    rows, each = x.numel() // shape[1], torch.rand(2, shape[0], shape[1]) + 0.5
    for statistics in ((), (each[0, :1], each[1, :1]), tuple(each)):
        got = quantize_images(x, bits, tile_rows, *statistics)
        # The body rounds what it normalizes to the dtype of x.
        want = body(quantize_images)(x.float(), bits, tile_rows, *statistics)
        codes = [unpack(t[0], bits, rows, shape[1]).int() for t in (got, want)]
        assert (codes[0] - codes[1]).abs().max() <= 1
        assert (codes[0] != codes[1]).float().mean() < 1e-3
        torch.testing.assert_close(got[1], want[1], rtol=0, atol=0 if bits > 2 else 1)
        torch.testing.assert_close(got[2], want[2])
    for function in (None, "hardswish"):
        copy = FewBitCopy(*got, bits, tile_rows, torch.randn(shape[1]))
        arguments = copy, dtype, function, list(shape)
        torch.testing.assert_close(
            dequantize_images(*arguments), body(dequantize_images)(*arguments)
        )


@images
@dtypes
def test_batch_norm_grad(dtype, shape, tile_rows):
    copy = FewBitCopy(*quantize_images(torch.randn(shape), 4, tile_rows), 4, tile_rows)
    dy = torch.randn(shape).to(dtype)
    for weight in (None, torch.randn(shape[1])):
        arguments = dy, copy, weight, torch.rand(shape[1])
        got, want = batch_norm_grad(*arguments), body(batch_norm_grad)(*arguments)
        torch.testing.assert_close(
            got[0], want[0], rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-5
        )
        torch.testing.assert_close(got[1:], want[1:], rtol=1e-4, atol=1e-3)


def test_no_value_of_images_is_beyond_a_kernel():
    x = torch.randn(2, 6, 4, 4)
    x[0, 0, 0, 0], x[0, 1, 1, 1], x[1, 2, 2, 2], x[:, 3], x[:, 4] = (
        *(math.nan, math.inf, -math.inf, 0, 3e-40),
    )
    for bits in (2, 4):
        got, want = quantize_images(x, bits, 32), body(quantize_images)(x, bits, 32)
        torch.testing.assert_close(got[1:], want[1:])


@dtypes
@pytest.mark.parametrize("count", [1, 70, 9001])
def test_slopes(count, dtype):
    x, dy = (4 * torch.randn(2, count)).to(dtype)
    for low, high, inside, outside in [(0.0, math.inf, 1.0, 0.01), (-3.0, 3.0, 1 / 6, 0.0)]:
        bits = slope_bits(x, low, high)
        assert torch.equal(bits, body(slope_bits)(x, low, high))
        want = body(slope_grad)(dy, bits, inside, outside)
        torch.testing.assert_close(slope_grad(dy, bits, inside, outside), want, rtol=0, atol=0)


@dtypes
@pytest.mark.parametrize("side", [32, 37])
def test_max_pool(side, dtype):
    x, window = torch.randn(3, 5, side, side + 1).to(dtype), ([3, 3, 2, 2, 1, 1, 1, 1], False)
    got, want = max_pool(x, *window), body(max_pool)(x, *window)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    arguments = torch.randn_like(got[0]), got[1], list(x.shape), *window
    dx = body(max_pool_grad)(*arguments)
    torch.testing.assert_close(max_pool_grad(*arguments), dx, rtol=0, atol=0)


@dtypes
@pytest.mark.parametrize("count", [1, 65, 300_001])
def test_topk(count, dtype):
    x = torch.randint(-40, 40, (count,)).to(dtype)  # many ties
    x[::7] = torch.randn(x[::7].shape).to(dtype)
    for k in {1, count // 10 + 1, count}:
        got, want = topk_pack(x, k), body(topk_pack)(x, k)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        dense = topk_unpack(*got, [count])
        assert torch.equal(dense, body(topk_unpack)(*want, [count]))
