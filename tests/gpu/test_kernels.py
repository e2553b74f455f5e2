"""Fused kernels on a CUDA device against the PyTorch bodies of their ops, on the same tensors."""

import copy
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.gemm import scaled_gemm
from razorctl.ops.packing import BITS
from tests.ops.calls import CALLS, RESULTS, Size, assert_agree, close, op_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 64), (197, 768), (1576, 3072), (130, 192), (130, 9024)]  # [rows, columns]
APART = ("draw", "int8_columns")  # which have tests of their own
KERNELS = [name for name in RESULTS if op_of(name).fused and name not in APART]


@pytest.fixture(autouse=True)
def no_kernel_fails() -> Iterator[None]:
    yield
    assert not kernels.failures()


def compare(name: str, size: Size) -> None:
    op = op_of(name)
    assert "cuda" in op.kernels, "no kernel is registered"
    for args in CALLS[name](size):
        if name.startswith("activation_grad"):  # the body rounds more often in 16 bits
            args = args[0].float(), *args[1:]
        twin = copy.deepcopy(args)  # a draw moves its phase
        assert_agree(name, op(*args), op.body(*twin), size, times=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_agrees_with_the_body(name, shape, dtype):
    compare(name, Size(*shape, 128, 5, dtype, device="cuda"))


@pytest.mark.parametrize("name", ["quantize", "dequantize", "norm_quantize", "int8_operand"])
@pytest.mark.parametrize("bits", BITS)
def test_every_number_of_bits(bits, name):
    compare(name, Size(197, 768, 128, bits, device="cuda"))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["activation_quantize", "gated_grad", "int8_operand"])
def test_every_function(name, function):
    compare(name, Size(197, 768, 128, function=function, device="cuda"))


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_columns(shape, dtype):
    """Codes of bf16, whose quotients are often halves, differ only where these are."""
    x, op = normal(*shape).to(dtype), op_of("int8_columns")
    (codes, scale), want = op(x), op.body(x)
    exact = (x.double() / want[1].double()).t()
    off = (codes.int() - want[0].int()).abs()
    assert off.max() <= 1
    assert ((exact - exact.floor() - 0.5).abs()[off > 0] < 1e-3).all()
    close(scale, want[1])


@pytest.mark.parametrize(("size", "total"), [(1, 1), (30, 6), (768, 77), (14336, 1434)])
def test_draws(size, total):
    p = op_of("project")(normal(size), total, 0.1 * total / size)
    ours, theirs = (torch.tensor(0.25, dtype=torch.float64, device="cuda") for _ in range(2))
    for _ in range(5):
        index, drawn = op_of("draw")(p, ours, total)
        other, _ = op_of("draw").body(p, theirs, total)
        assert (index != other).float().mean() < 0.01  # sums of doubles in another order
        assert torch.equal(drawn, p[index].float())
        assert torch.equal(ours, theirs)


GEMMS = [(1, 1, 1), (17, 8, 8), (33, 17, 70), (3152, 768, 768), (768, 3072, 3152), (100, 10, 768)]


def operands(m: int, n: int, k: int) -> tuple[Tensor, ...]:
    a, b = (torch.randint(-128, 128, (s, k), device="cuda", dtype=torch.int8) for s in (m, n))
    a[:, 0] = b[:, 0] = -128
    return a, b, normal(m, 1).abs(), normal(n).abs(), normal(m), normal(n)


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
