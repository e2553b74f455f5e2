"""Interpreted kernels of a card against the PyTorch bodies of their ops.

Calls go through the dispatcher, which refuses results that share memory.
"""

import copy
from typing import Any

import pytest
import torch

from razorctl.ops import kernels
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.triton import topk
from tests import references
from tests.ops.calls import CALLS, RESULTS, Size, assert_agree, close, op_of, same_codes
from tests.references import copied

pytestmark = pytest.mark.usefixtures("card")
KERNELS = [name for name in RESULTS if op_of(name).fused]
INF, NAN = torch.inf, torch.nan
# Ragged tiles, one row a tile, and one tile that is longer than the rows.
SIZES = [
    Size(40, 64, 16, 5),
    Size(37, 128, 36, 2, torch.bfloat16, "silu"),
    Size(20, 64, 20, 8, torch.float16, "relu6"),
    Size(2, 64, 1, 6, torch.bfloat16, "gelu-tanh"),
    Size(21, 64, 300, 4, function="relu"),
]
LONG = Size(300, 64, 280, 3)  # with a tile that a program cannot hold at once


def compare(name: str, size: Size, some: slice = slice(None)) -> None:
    op, ran = op_of(name), False
    for args in [*CALLS[name](size)][some]:
        if name.startswith("activation_grad"):  # the body rounds more often in 16 bits
            args = args[0].float(), *args[1:]
        twin = copy.deepcopy(args)  # a draw moves its phase
        kernels._ran.discard((name, "cuda"))
        got = op(*args)
        ran |= (name, "cuda") in kernels._ran
        assert_agree(name, got, op.body(*twin), size)
    refused = {
        "norm_again": size.tile_rows > 128,
        "linear_operands": size.tile_rows % 4 and size.rows > size.tile_rows,
    }
    assert ran or refused.get(name)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_agrees_with_the_body(name, size):
    every = 1 + SIZES.index(size) % 2  # each second size has each second call
    compare(name, size, slice(None, None, every))


@pytest.mark.parametrize("name", ["activation_quantize", "quantize", "norm_quantize"])
def test_a_tile_longer_than_a_program_holds(name):
    compare(name, LONG)


@pytest.mark.parametrize("name", ["dequantize", "norm_grad", "quantize"])
@pytest.mark.parametrize("bits", [3, 4])
def test_every_number_of_bits(bits, name):
    compare(name, Size(20, 64, 8, bits), slice(2))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", ["activation_grad", "gated_grad", "int8_operand"])
def test_every_function(name, function):
    compare(name, Size(20, 64, 8, function=function))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_activations_in_16_bits(dtype):
    dy, copy = torch.randn(33, 64).to(dtype), copied(torch.randn(33, 64), 4, 33)
    op, with_int8 = op_of("activation_grad"), op_of("activation_grad_int8")
    got, want = op(dy, copy, "gelu"), op.body(dy.float(), copy, "gelu")
    torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=1e-4)
    dy[1], dy[2, 3] = 0, NAN
    codes, scale, *of_columns = with_int8(dy, copy, "silu")
    wanted = references.int8_rows(op(dy, copy, "silu"))
    finite = dy.isfinite().all(1)
    same_codes(codes[finite], wanted[0][finite])
    close(scale, wanted[1])
    torch.testing.assert_close(of_columns, list(wanted[2:]), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("function", ["silu", "gelu"])
@pytest.mark.parametrize("widest", [768, 63])  # in one kernel, and in two
def test_int8_gradients_of_activations(widest, function, monkeypatch):
    monkeypatch.setattr("razorctl.ops.triton.activation.WIDEST", widest)
    dy, copy = torch.randn(26, 64), copied(torch.randn(26, 64), 5, 16)
    codes, scale, *_ = op_of("activation_grad_int8")(dy, copy, function)
    want = op_of("activation_grad").body(dy, copy, function)
    off = (codes * scale - want).abs()
    assert (off <= 0.51 * scale + 2e-5 * dy.abs()).all()
    if function != "gelu":
        compare("activation_grad_int8", Size(26, 64, 16, function=function))


def test_int8_rows_of_what_is_not_finite():
    codes, scale, total, largest = op_of("int8_rows")(
        torch.tensor([[1.0, INF, -INF], [2.0, NAN, 3.0]])
    )
    assert codes[0].tolist() == [0, 127, -127]
    assert scale[0].item() == pytest.approx(torch.finfo(torch.float32).max / 127)
    assert scale[1].isnan()
    assert total.isfinite().tolist() == [True, False, False]
    assert largest.isnan().tolist() == [False, True, False]


def test_a_gradient_of_a_norm_that_is_not_finite():
    residual = torch.zeros(4, 64)
    residual[1, 3], residual[2, 5] = NAN, INF
    args = torch.randn(4, 64), copied(torch.randn(4, 64), 4, 4), None, torch.ones(4, 1), True
    dx, *_, codes, scale, _, _ = op_of("norm_grad_int8")(*args, residual)
    want = references.int8_rows(dx)
    torch.testing.assert_close(scale, want[1], equal_nan=True)
    assert scale[1].isnan()
    assert torch.equal(codes[[0, 2, 3]], want[0][[0, 2, 3]])


def test_infinities_become_the_ends_of_a_copy():
    x = Size(9, 64, 9, 4, torch.float16).x()
    x[0, :3], x[:, 3] = torch.tensor([INF, -INF, 0]), 0
    got, want = (run(x, 4, 9) for run in (op_of("quantize"), op_of("quantize").body))
    assert_agree("quantize", got, want, Size(9, 64, 9, 4))
    (copy, f, *others) = next(iter(CALLS["norm_again"](Size(8, 64, 8))))
    f[1, 3], f[2, 5] = INF, -INF
    codes, *ends = op_of("norm_again")(copy, f, *others)
    assert (codes.view(8, 64)[1, 3], codes.view(8, 64)[2, 5]) == (255, 0)
    want = op_of("norm_again").body(copy, f, *others)
    torch.testing.assert_close(ends, list(want[1:]), rtol=2**-7, atol=1)


def test_what_is_not_finite_is_projected():
    log_w = torch.tensor([INF, -INF, NAN, 0.0, 1.0, -2.0, 3e4])
    for p_min, total in ((0.05, 3), (0.3, 7), (0.5, 3.5)):  # the last two at the bounds
        got, want = (f(log_w, total, p_min) for f in (op_of("project"), op_of("project").body))
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24])
@pytest.mark.parametrize(("size", "count"), [(1, 1), (49, 49), (768, 77)])
def test_draws_of_equal_chances_fill_every_place(size, count, u):
    p = torch.full((size,), count / size, dtype=torch.float64)
    phase = torch.tensor((u - (5**0.5 - 1) / 2) % 1, dtype=torch.float64)
    index, drawn = op_of("draw")(p, phase, count)
    assert len(index.unique()) == count
    assert 0 <= index.min() <= index.max() < size
    assert (drawn == count / size).all()


def test_stretches_are_whole_blocks_and_few():
    for n in (1, topk.BLOCK, 10**7, 2**31 - 1):
        stretch = topk._stretch(n)
        assert stretch % topk.BLOCK == 0
        assert -(-n // stretch) <= int(topk.PROGRAMS)
    assert topk.BLOCK % 8 == 0


X, HEADS = torch.randn(4, 6), torch.randn(2, 3, 7, 24)
CODES, ONE, P = torch.ones(3, 5, dtype=torch.int8), torch.ones(3), torch.ones(4).double()
APART = HEADS.transpose(1, 2).contiguous().transpose(1, 2)
NARROW = torch.randn(2, 3, 7, 25)[..., :24]  # a row starts where no vector does
TAKES: list[tuple[str, bool, tuple[Any, ...]]] = [
    ("gated_grad", True, (X, X, X, "silu")),
    ("gated_grad", False, (X, X.t().contiguous().t(), X, "silu")),
    ("gated_grad", False, (X, X.double(), X, "silu")),
    ("int8_heads", True, (HEADS, HEADS, HEADS)),
    ("int8_heads", False, (HEADS, HEADS, APART)),
    ("int8_heads", False, (NARROW, NARROW, NARROW)),
    ("scaled_gemm", True, (CODES, CODES, ONE[:, None], ONE, torch.float32)),
    ("scaled_gemm", False, (CODES[:0], CODES, ONE[:, None], ONE, torch.float32)),
    ("scaled_gemm", False, (CODES, CODES, ONE[:, None], ONE.double(), torch.float32)),
    ("scaled_gemm", False, (CODES, CODES, None, ONE, torch.float64, None, None)),
    ("project", True, (torch.zeros(4), 2, 0.1)),
    ("project", False, (torch.zeros(4), 5, 0.1)),
    ("project", False, (torch.zeros(4), 1, 0.5)),
    ("draw", True, (P, torch.zeros(()).double(), 2)),
    ("draw", False, (P.float(), torch.zeros(()).double(), 2)),
    ("topk_pack", True, (ONE, 1)),
    ("topk_pack", False, (ONE.double(), 1)),
    ("topk_pack", False, (torch.empty(2**31, device="meta", dtype=torch.float16), 1)),
    ("topk_unpack", True, (ONE[:1], torch.zeros(1, dtype=torch.uint8), [3])),
]


@pytest.mark.parametrize("number", range(len(TAKES)))
def test_what_a_kernel_takes(number):
    name, taken, args = TAKES[number]
    assert kernels.REGISTERED[name, "cuda"].takes(*args) == taken
