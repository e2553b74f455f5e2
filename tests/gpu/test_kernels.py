"""Fused kernels on a CUDA device against the PyTorch bodies of their ops, on the same tensors."""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops.activation import activation_grad, activation_grad_int8, activation_quantize
from razorctl.ops.columns import gather_columns
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.gated import gated_grad
from razorctl.ops.gemm import scaled_gemm
from razorctl.ops.int8 import int8_columns, int8_heads, int8_rows
from razorctl.ops.int8_operand import int8_operand
from razorctl.ops.linear_again import linear_again, linear_copy_again
from razorctl.ops.norm import norm_grad, norm_grad_int8, norm_quantize, residual_add
from razorctl.ops.op import FewBitCopy, Op
from razorctl.ops.packing import BITS
from razorctl.ops.quantize import dequantize, quantize
from razorctl.ops.sampling import draw, project
from razorctl.ops.topk import topk_pack, topk_unpack
from tests import references
from tests.references import copied

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [(1, 64), (197, 768), (1576, 3072), (130, 200), (77, 33)]  # [rows, columns]
TILE_ROWS = 128
SELDOM = 1e-3  # how many codes may round the other way


@pytest.fixture(autouse=True)
def no_kernel_fails() -> Iterator[None]:
    yield
    assert not kernels.failures()


def both(op: Op[..., Any], *args: Any) -> tuple[Any, Any]:
    """The results of the kernel and of the PyTorch body, of equal arguments."""
    assert "cuda" in op.kernels, "no kernel is registered"
    return op(*args), op.body(*args)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def close(got: Tensor, want: Tensor, slack: float = 4, jumps: bool = False) -> None:
    """Equal up to some roundings of their dtype, or of the sums that they come from.

    jumps: whether a rounding may lead to the other side of a jump, which it does seldom.
    """
    assert got.dtype == want.dtype
    eps = torch.finfo(want.dtype).eps
    scale = want.float().abs().amax().item() or 1.0
    bounds = {"rtol": slack * eps, "atol": slack * max(eps, 1e-6) * scale}
    if jumps:
        assert (~torch.isclose(got, want, **bounds)).float().mean() < SELDOM
    else:
        torch.testing.assert_close(got, want, **bounds)


def same_copy(
    got: tuple[Tensor, ...],
    want: tuple[Tensor, ...],
    bits: int,
    rows: int,
    seldom: float = SELDOM,
) -> None:
    """Two few-bit copies stand for the same values; a share of codes may be the next ones."""
    assert [t.shape for t in got] == [t.shape for t in want]
    ours, theirs = (
        references.dequantize(FewBitCopy(*copy, bits, TILE_ROWS), rows, torch.float32)
        for copy in (got, want)
    )
    step = want[2].float().repeat_interleave(TILE_ROWS, 0)[:rows]
    assert ((ours - theirs).abs() <= 1.2 * step + 1e-6).all()
    assert ((ours - theirs).abs() > 0.2 * step + 1e-6).float().mean() < seldom


def same_codes(got: Tensor, want: Tensor, exact: Tensor | None = None) -> None:
    """int8 codes of which few may be the next ones.

    exact: the values before they are rounded. Codes may differ where those lie between two: of
    bf16, whose quotients are often halves, these are not few.
    """
    assert got.shape == want.shape
    off = (got.int() - want.int()).abs()
    if exact is not None:
        assert off.max() <= 1
        assert ((exact - exact.floor() - 0.5).abs()[off > 0] < 1e-3).all()
        return
    assert off.max() <= 1
    assert off.float().mean() < SELDOM


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "bits"), list(product(SIZES, BITS)))
def test_quantize(size, bits, dtype):
    x = normal(*size, dtype=dtype)
    mean, rstd = x.float().mean(1, keepdim=True), 1 / x.float().std(1, keepdim=True).clamp(0.1)
    seed = torch.tensor(3, device="cuda")
    for extra in ((), (mean, rstd), (None, rstd), (None, None, seed)):
        got, want = both(quantize, x, bits, TILE_ROWS, *extra)
        same_copy(got, want, bits, len(x))
    copy = FewBitCopy(*want, bits, TILE_ROWS, normal(size[1]))
    close(*both(dequantize, copy, len(x), dtype))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_activations(size, dtype, function):
    x, dy = normal(*size, dtype=dtype), normal(*size, dtype=dtype)
    for bits in (2, 4, 5, 8):
        got, want = both(activation_quantize, x, function, bits, TILE_ROWS)
        close(got[0], want[0])
        same_copy(got[1:], want[1:], bits, len(x))
        copy = FewBitCopy(*want[1:], bits, TILE_ROWS)
        jumps = function == "hardswish"  # at 3, which codes seldom stand for exactly
        close(*both(activation_grad, dy, copy, function), slack=16, jumps=jumps)
    for ours, theirs in zip(
        *both(gated_grad, dy, x, normal(*size, dtype=dtype), function), strict=True
    ):
        close(ours, theirs, slack=16, jumps=jumps)


@pytest.mark.parametrize("centers", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_norms(size, dtype, centers):
    x, dy, weight, bias = (
        normal(*size, dtype=dtype),
        normal(*size),
        normal(size[1], dtype=dtype),
        normal(size[1], dtype=dtype),
    )
    for bits, affine in product((4, 8), (True, False)):
        own = (weight, bias if centers else None) if affine else (None, None)
        got, want = both(norm_quantize, x, *own, 1e-5, centers, bits, TILE_ROWS, dtype)
        close(got[0], want[0])
        close(got[1], want[1], slack=100)
        same_copy(got[2:], want[2:], bits, len(x))
        for residual in (None, normal(*size)):
            copy = FewBitCopy(*want[2:], bits, TILE_ROWS)
            args = copy, own[0], want[1], centers, residual
            for ours, theirs in zip(*both(norm_grad, dy, *args), strict=True):
                close(ours, theirs, slack=100)


@pytest.mark.parametrize("centers", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_sums_whose_statistics_a_norm_takes(size, dtype, centers):
    got, want = both(residual_add, normal(*size), normal(*size, dtype=dtype), 1e-5, centers)
    assert torch.equal(got[0], want[0])
    assert got[1].shape == want[1].shape
    for ours, theirs in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    args = normal(size[1]), None, 1e-5, centers, 5, TILE_ROWS, dtype, *want[1:]
    got, want = both(norm_quantize, want[0], *args)
    close(got[0], want[0])
    assert got[1].shape == want[1].shape == (0,)
    same_copy(got[2:], want[2:], 5, size[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [*SIZES, (130, 8192), (130, 9024)])
def test_gradients_with_their_int8_copy(size, dtype):
    x, dy, rstd = normal(*size), normal(*size, dtype=dtype), normal(size[0], 1).abs()
    copy = copied(x, 5, TILE_ROWS)
    norm = normal(size[1]), rstd, True, normal(*size)
    for got, alone in (
        (norm_grad_int8(dy, copy, *norm), norm_grad(dy, copy, *norm)),
        (activation_grad_int8(dy, copy, "silu"), (activation_grad(dy, copy, "silu"),)),
    ):
        for ours, theirs in zip(got[:-4], alone, strict=False):
            close(ours, theirs, slack=100)
        want = int8_rows.body(alone[0])
        same_codes(got[-4], want[0])
        close(got[-3], want[1])
        close(got[-2], want[2], slack=100)
        close(got[-1], want[3])
    # The slope of GELU is off by 1.2e-5 in int8 copies.
    got, want = activation_grad_int8(dy, copy, "gelu"), activation_grad(dy, copy, "gelu").float()
    off = (got[0] * got[1] - want).abs() - got[1]
    assert (off <= 2e-5 * dy.float().abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_of_heads(dtype):
    joint = normal(2, 197, 3 * 768, dtype=dtype)
    views = joint.view(2, 197, 3, 12, 64).permute(2, 0, 3, 1, 4).unbind(0)
    apart = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in views]
    for q, k, v in (views, apart):
        got, want = both(int8_heads, q, k, v)
        same_codes(got[0], want[0])
        close(got[1], want[1])
        close(got[2], want[2], slack=100)
        close(got[3], want[3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_int8(size, dtype):
    x = normal(*size, dtype=dtype)
    got, want = both(int8_rows, x)
    same_codes(got[0], want[0])
    close(got[1], want[1])
    close(got[2], want[2], slack=100)
    close(got[3], want[3])
    ours, theirs = both(int8_columns, x)
    same_codes(ours[0], theirs[0], (x.double() / theirs[1].double()).t())
    close(ours[1], theirs[1])
    for function, bits in product((None, "gelu"), (2, 4, 5, 8)):
        copy = copied(x, bits, TILE_ROWS)._replace(bias=normal(size[1]))
        ours, theirs = both(int8_operand, copy, want[1], function)
        same_codes(ours[0], theirs[0])
        close(ours[1], theirs[1], slack=100)
        close(ours[2], theirs[2], slack=100)
        more = normal(33, size[1]), normal(33), torch.float32
        wide = normal(192, size[1]), normal(192), torch.float16
        ours, theirs = both(linear_again, copy, len(x), function, *more)
        assert (ours - theirs).norm() <= 2e-3 * theirs.norm()
        # Of 768 int8 codes of f(x), some are next ones, which moves a sum by a tenth of a code.
        seldom = SELDOM if function is None else 0.03
        same_copy(*both(linear_copy_again, copy, len(x), function, *wide), 8, len(x), seldom)


GEMMS = [(1, 1, 1), (17, 8, 8), (33, 17, 70), (3152, 768, 768), (768, 3072, 3152), (100, 10, 768)]


def operands(m: int, n: int, k: int) -> tuple[Tensor, ...]:
    a, b = (torch.randint(-128, 128, (s, k), device="cuda", dtype=torch.int8) for s in (m, n))
    a[:, 0] = b[:, 0] = -128
    return a, b, normal(m, 1).abs(), normal(n).abs(), normal(m), normal(n)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), GEMMS)
def test_scaled_gemm(m, n, k, dtype):
    a, b, a_scale, b_scale, left, right = operands(m, n, k)
    b_scale /= 128 * k  # the results fit in half precision
    for scale, outer in ((a_scale, (left, right)), (None, ()), (a_scale, (None, None))):
        close(*both(scaled_gemm, a, b, scale, b_scale, dtype, *outer))


@pytest.mark.parametrize(("m", "n", "k"), GEMMS)
def test_every_way_to_a_gemm_gives_the_same(m, n, k):
    from razorctl.ops.triton import gemm

    a, b, a_scale, b_scale, left, right = operands(m, n, k)
    exact = (a.double() @ b.double().t()).float()
    capability = gemm._capability(a.device)
    for way in gemm.ways(capability, n % 16 == 0, few=True).values():
        out = a_scale.new_empty(m, n)
        work = gemm._aligned(a), gemm._aligned(b)
        way(*work, None, torch.ones_like(b_scale), None, None, gemm.GemmOutput(out))
        assert torch.equal(out, exact)
        way(*work, a_scale, b_scale, left, right, gemm.GemmOutput(out))
        close(out, exact * a_scale * b_scale + left[:, None] * right)


def test_sums_too_long_for_int32():
    a = torch.full((20, 2**17 + 40), -128, device="cuda", dtype=torch.int8)
    got = scaled_gemm(a, a, None, torch.ones(20, device="cuda"), torch.float32)
    assert (got == 2.0**14 * a.shape[1]).all()


def test_a_gemm_can_be_captured_before_it_is_tuned():
    a, b, a_scale, b_scale, *_ = operands(208, 96, 64)
    scaled_gemm(a, b, a_scale, b_scale, torch.float32)  # compiles, for other sizes as well
    a, b, a_scale, b_scale, *_ = operands(4112, 96, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = scaled_gemm(a, b, a_scale, b_scale, torch.float32)
    graph.replay()
    close(got, scaled_gemm(a, b, a_scale, b_scale, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 8, 4097, 197 * 768, 5_000_001])
def test_topk(n, dtype):
    some = normal(n, dtype=dtype)
    odd = torch.where(some > 1, torch.nan, some * torch.finfo(dtype).max)
    for x, share in product((some, (3 * some).round(), odd, torch.zeros_like(some)), (0.1, 0.9)):
        got, want = both(topk_pack, x, max(1, int(share * n)))
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        back = both(topk_unpack, *want, [n])
        torch.testing.assert_close(*back, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_gather_columns(size, dtype):
    x = normal(*size, dtype=dtype)
    index = torch.randperm(size[1], device="cuda")[: size[1] // 2].sort().values
    for layout in (x, x.T.contiguous().T):
        assert torch.equal(*both(gather_columns, layout, index))


@pytest.mark.parametrize("spread", [0.0, 1.0, 3e3])
@pytest.mark.parametrize(("size", "total"), [(1, 1), (30, 6), (768, 77), (14336, 1434)])
def test_sampling(size, total, spread):
    p, want = both(project, spread * normal(size), total, 0.1 * total / size)
    torch.testing.assert_close(p, want, rtol=1e-6, atol=1e-8)
    assert p.sum().item() == pytest.approx(total, rel=1e-8)
    ours, theirs = (torch.tensor(0.25, dtype=torch.float64, device="cuda") for _ in range(2))
    for _ in range(5):
        index, drawn = draw(p, ours, total)
        other, _ = draw.body(p, theirs, total)
        assert (index != other).float().mean() < 0.01  # sums of doubles in another order
        assert torch.equal(drawn, p[index].float())
        assert torch.equal(ours, theirs)
