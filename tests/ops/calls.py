"""Arguments of every op, and how results of two implementations of it may differ."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from razorctl.ops.gemm import COPY_ROWS
from razorctl.ops.images import quantize_images
from razorctl.ops.op import OPS, FewBitCopy, Op
from razorctl.ops.packing import unpack
from razorctl.ops.pool import max_pool
from razorctl.ops.quantize import quantize
from razorctl.ops.sampling import projected
from razorctl.ops.topk import pack_bits


@dataclass(frozen=True)
class Size:
    """Of an activation [rows, columns] and of a copy of it."""

    rows: int = 40
    columns: int = 128
    tile_rows: int = 16
    bits: int = 5
    dtype: torch.dtype = torch.float32
    function: str = "gelu"
    device: str = "cpu"

    @property
    def shape(self) -> list[int]:
        """Of two images whose channels are the columns, or of one."""
        images = 2 - self.rows % 2
        return [images, self.columns, self.rows // images]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape or (self.rows, self.columns), device=self.device)

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.device) + 0.1

    def codes(self, *shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, dtype=torch.int8, device=self.device)

    def x(self, dtype: torch.dtype | None = None) -> Tensor:
        """Values with a spread of sizes, in rows that lie apart."""
        columns = self.columns + 8
        spread = torch.logspace(-2, 1, columns, device=self.device)
        x = self.normal(self.rows, columns) * spread + 1
        return x.to(dtype or self.dtype)[:, : self.columns]

    def copy(self, bias: bool = False) -> FewBitCopy:
        """A copy of x; with a bias a copy as of a norm, whose weight may flip a column's sign.

        The body makes it, since an interpreted kernel takes longer than what is tested.
        """
        args = self.x(torch.float32), self.bits, self.tile_rows
        copy = FewBitCopy(*quantize.body(*args), *args[1:])
        if not bias:
            return copy
        turned = self.positive(self.columns) * (1 - 2 * (torch.arange(self.columns) % 2)).to(
            self.device
        )
        return copy._replace(scale=copy.scale * turned, bias=self.normal(self.columns))

    def first_column(self) -> Tensor:
        """A mask of the elements in the first column."""
        return torch.arange(self.rows * self.columns, device=self.device) % self.columns == 0

    def images(self, dtype: torch.dtype | None = None) -> Tensor:
        spread = torch.logspace(-2, 1, self.columns, device=self.device)
        return (self.normal(*self.shape) * spread[:, None]).to(dtype or self.dtype)

    def copy_of_images(self, bias: bool = False) -> FewBitCopy:
        of_x = quantize_images.body(self.images(torch.float32), self.bits, self.tile_rows)
        more = self.normal(self.columns) if bias else None
        return FewBitCopy(*of_x, self.bits, self.tile_rows, more)


WINDOW = [3, 3, 2, 2, 1, 1, 1, 1], False
Calls = Iterable[tuple[Any, ...]]


def _norm_again(s: Size) -> Calls:
    """After a sum of x_hat, of x itself, and of a scaled branch."""
    rows = s.normal(s.rows, 1), s.positive(s.rows, 1)
    scale = s.positive(s.columns)
    for bias, gamma, statistics in (
        (False, None, rows),
        (True, None, (None, None)),
        (False, scale, rows),
    ):
        sums = None if bias else s.normal(s.rows, 1), s.positive(s.rows, 1)
        yield s.copy(bias), s.x(), gamma, *statistics, *sums


def _norm_quantize(s: Size) -> Calls:
    mean, rstd = s.normal(s.rows, 1), s.positive(s.rows, 1)
    affine = s.normal(s.columns).to(s.dtype), s.normal(s.columns).to(s.dtype)
    for centers, (weight, bias), statistics in (
        (True, affine, ()),
        (False, (affine[0], None), ()),
        (True, (None, None), (mean, rstd)),
        (False, (affine[0], None), (torch.empty(0, device=s.device), rstd)),
    ):
        yield s.x(), weight, bias, 1e-5, centers, s.bits, s.tile_rows, s.dtype, *statistics


def _norm_grad(s: Size) -> Calls:
    for centers in (True, False):
        weight = s.normal(s.columns) if centers else None
        residual = None if centers else s.x()
        yield s.x(), s.copy(), weight, s.positive(s.rows, 1), centers, residual


def _linear_again(s: Size, outputs: int, dtype: torch.dtype) -> Calls:
    for bias, function in ((True, None), (False, s.function)):
        weight, offset = s.normal(outputs, s.columns), s.normal(outputs) if bias else None
        yield s.copy(bias), s.rows, function, weight, offset, dtype


def _scaled_gemm(s: Size) -> Calls:
    a, b = s.codes(s.rows, s.columns), s.codes(32, s.columns)
    scales = s.positive(s.rows, 1), s.positive(32) / (100 * s.columns)
    outer = s.normal(s.rows), s.normal(32)
    yield a, b, *scales, s.dtype
    yield a, b, None, scales[1], s.dtype, *outer
    yield a.T.contiguous().T, b.T.contiguous().T, *scales, s.dtype, *outer


def _int8_heads(s: Size) -> Calls:
    """Views of a joint output, and heads as fused attention returns them."""
    joint = s.normal(2, s.rows, 3, 2, s.columns // 2).to(s.dtype)
    views = joint.permute(2, 0, 3, 1, 4).unbind(0)
    yield tuple(views)
    yield tuple(t.contiguous() for t in views)


def _quantize(s: Size) -> Calls:
    mean, rstd, seed = s.normal(s.rows, 1), s.positive(s.rows, 1), torch.tensor(7, device=s.device)
    for more in ((), (mean, rstd), (None, rstd), (None, None, seed), (mean, rstd, seed)):
        yield s.x(), s.bits, s.tile_rows, *more


def _quantize_images(s: Size) -> Calls:
    for images in (0, 1, s.shape[0]):
        statistics = (s.normal(images, s.columns), s.positive(images, s.columns)) if images else ()
        # The body rounds what it normalizes to the dtype of x.
        dtype = torch.float32 if images else s.dtype
        yield s.images(dtype), s.bits, s.tile_rows, *statistics


def _topk(s: Size) -> Calls:
    """Ties, what is not finite, zeros."""
    some = s.x().contiguous().flatten()
    odd = torch.where(some > 1, torch.nan, some * torch.finfo(s.dtype).max)
    for x in ((3 * some).round(), odd, torch.zeros_like(some)):
        for k in {1, x.numel() // 10 + 1, x.numel()}:
            yield x, k


def _linear_operands(s: Size) -> Calls:
    for bias, function in ((True, None), (False, s.function)):
        weight = s.normal(24, s.columns) if bias else None
        dy = s.codes(s.rows, 24), s.positive(s.rows, 1), s.positive(24)
        yield *dy, s.copy(bias), function, weight


def _max_pool_grad(s: Size) -> Calls:
    x = s.normal(3, 5, 21, s.rows % 32 + 8).to(s.dtype)
    y, places = max_pool.body(x, *WINDOW)
    yield torch.randn_like(y), places, list(x.shape), *WINDOW


# Op -> the arguments of its calls, for each branch of it.
CALLS: dict[str, Callable[[Size], Calls]] = {
    "activation_grad": lambda s: [(s.x(), s.copy(), s.function)],
    # A card's slope of GELU is off by 1.2e-5 in int8 copies, which tests of kernels bound.
    "activation_grad_int8": lambda s: [
        (s.x(), s.copy(), "silu" if s.function == "gelu" else s.function)
    ],
    "activation_quantize": lambda s: [(s.x(), s.function, s.bits, s.tile_rows)],
    "attention_again": lambda s: [(*s.normal(3, s.rows, 2, 4, 64), None, True, None, False)],
    "batch_norm_grad": lambda s: [
        (s.images(), s.copy_of_images(), weight, s.positive(s.columns))
        for weight in (None, s.normal(s.columns))
    ],
    "cast": lambda s: [(s.x(torch.float32), torch.bfloat16)],
    "dequantize": lambda s: [
        (s.copy(), s.rows, s.dtype),
        (s.copy(bias=True), s.rows, torch.float32),
    ],
    "dequantize_images": lambda s: [
        (s.copy_of_images(bias), s.dtype, function, s.shape)
        for bias, function in ((True, None), (False, s.function))
    ],
    "draw": lambda s: [
        (projected(2 * s.normal(s.columns), count, 0.1 * count / s.columns), phase, count)
        for count in {1, -(-s.columns // 4), s.columns}
        for phase in (torch.tensor(0.25, dtype=torch.float64, device=s.device),)
    ],
    "gather_columns": lambda s: [
        (x, torch.arange(0, s.columns, 3, device=s.device)) for x in (s.x(), s.x().T.contiguous().T)
    ],
    "gated_grad": lambda s: [
        (*(t.to(s.dtype) for t in 3 * s.normal(3, s.rows, s.columns)), s.function)
    ],
    "int8_columns": lambda s: [
        (s.x(),),
        (s.x(), factor := s.positive(s.rows, 1)),
        (x := s.x(), factor, (2 * x.float() * factor).abs().amax(0)),
    ],
    "int8_heads": _int8_heads,
    "int8_operand": lambda s: [
        (s.copy(bias), s.positive(s.rows, 1), function)
        for bias, function in ((True, None), (False, s.function))
    ],
    "int8_rows": lambda s: [(s.x(),)],
    "linear_again": lambda s: _linear_again(s, 32, torch.bfloat16),
    "linear_copy_again": lambda s: _linear_again(s, 64, torch.bfloat16),
    "linear_cross_entropy": lambda s: [
        (
            *(s.x(), s.normal(16 * s.columns, s.columns), s.normal(16 * s.columns)),
            *(torch.arange(s.rows, device=s.device) % s.columns,),
            *(-100, 0.1, factor, True, True, True),
        )
        for factor in (None, torch.ones(s.rows))
    ],
    "linear_operands": _linear_operands,
    "linear_weight_grad": lambda s: [
        (s.normal(s.rows, 24).to(s.dtype), s.copy(bias), function)
        for bias, function in ((True, None), (False, s.function))
    ],
    "max_pool": lambda s: [(s.normal(3, 5, 21, s.rows % 32 + 8).to(s.dtype), *WINDOW)],
    "max_pool_grad": _max_pool_grad,
    "norm_again": _norm_again,
    "norm_grad": _norm_grad,
    "norm_grad_int8": _norm_grad,
    "norm_quantize": _norm_quantize,
    "normalize": lambda s: [
        (s.x(), s.normal(s.columns).to(s.dtype), None, 1e-5, centers, s.dtype)
        for centers in (True, False)
    ],
    "pixel_cross_entropy": lambda s: [
        (
            *(s.normal(3, 5, 4, 6).to(s.dtype), torch.randint(5, (3, s.rows, 50))),
            *(False, *scales, 255, 0.1, None, True),
        )
        for scales in ((None, None), (s.rows / 4, 50 / 6))
    ],
    "project": lambda s: [
        (spread * s.normal(s.columns), max(1, s.columns // 4), 0.01 / s.columns)
        for spread in (0.0, 1.0, 3e3)
    ],
    "quantize": _quantize,
    "quantize_images": _quantize_images,
    "residual_add": lambda s: [
        (s.x(wide), s.x(), 1e-6, centers)
        for wide in (torch.float32, torch.bfloat16)
        for centers in (True, False)
    ],
    "row_operands": lambda s: [call[:4] for call in _linear_again(s, 32, torch.bfloat16)],
    "scaled_gemm": _scaled_gemm,
    "slope_bits": lambda s: (
        [(s.x().flatten(), low, 3.0) for low in (0.0, -3.0)] + [(s.x().flatten(), 0.0, math.inf)]
    ),
    "slope_grad": lambda s: [
        (s.x(), pack_bits(s.normal().flatten() > 0), inside, outside)
        for inside, outside in ((1.0, 0.01), (1 / 6, 0.0))
    ],
    "topk_pack": _topk,
    "topk_unpack": lambda s: [
        (s.x()[:, 0].contiguous(), pack_bits(s.first_column()), [s.rows, s.columns])
    ],
}
# Op -> what its results are: equal numbers, floats, sums of the rows, whole numbers of int8 of
# which few may be the next one, the three tensors of a copy, or a product with such numbers.
RESULTS = {
    "activation_grad": "float",
    "activation_grad_int8": "int8 float sum float",
    "activation_quantize": "float copy",
    "batch_norm_grad": "sum sum sum",
    "cast": "equal",
    "dequantize": "float",
    "dequantize_images": "float",
    "draw": "equal equal",
    "gather_columns": "equal",
    "gated_grad": "float float",
    "int8_columns": "int8 float",
    "int8_heads": "int8 float sum float",
    "int8_operand": "int8 float float",
    "int8_rows": "int8 float sum float",
    "linear_again": "product",
    "linear_copy_again": "copy",
    "linear_operands": "int8 float int8 float float int8 float",
    "linear_weight_grad": "product",
    "max_pool": "equal equal",
    "max_pool_grad": "equal",
    "norm_again": "copy",
    "norm_grad": "float sum sum",
    "norm_grad_int8": "float sum sum int8 float sum float",
    "norm_quantize": "float float copy",
    "normalize": "float float float",
    "project": "float",
    "quantize": "copy",
    "quantize_images": "copy",
    "residual_add": "equal float float",
    "row_operands": "int8 float int8 float",
    "scaled_gemm": "float",
    "slope_bits": "equal",
    "slope_grad": "equal",
    "topk_pack": "equal equal",
    "topk_unpack": "equal",
}
SELDOM = 2e-3  # how many whole numbers may be the next one


def op_of(name: str) -> Op[..., Any]:
    return OPS[f"razorctl::{name}"]


def assert_agree(name: str, got: Any, want: Any, size: Size, times: float = 1) -> None:
    """Results of two implementations are the same but for roundings.

    times: how many times the usual roundings of floats are allowed.
    """
    bits, rows = (8, COPY_ROWS) if "linear_copy" in name else (size.bits, size.tile_rows)
    bits = 8 if name == "norm_again" else bits
    ours, theirs = ([*t] if isinstance(t, tuple | list) else [t] for t in (got, want))
    if name == "linear_operands":  # what pads codes of x is whatever was there
        ours[2], theirs[2] = ours[2][:, : size.rows], theirs[2][:, : size.rows]
    for kind in RESULTS[name].split():
        count = 3 if kind == "copy" else 1
        some, others = ours[:count], theirs[:count]
        del ours[:count], theirs[:count]
        if kind == "copy":
            same_copy(some, others, bits, rows)
        elif kind in SLACK:
            close(some[0], others[0], times * SLACK[kind])
        else:
            ALIKE[kind](some[0], others[0])
    assert not ours
    assert not theirs


def equal(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def close(got: Tensor, want: Tensor, slack: float = 16) -> None:
    """Equal up to roundings of the dtype, and of single precision."""
    eps = torch.finfo(want.dtype).eps
    rounding = 2 * eps if want.dtype.itemsize == 2 else 0.0
    size = want.float().abs().nan_to_num(0, 0).amax().item() if want.numel() else 0.0
    single = slack * torch.finfo(torch.float32).eps
    torch.testing.assert_close(
        got, want, rtol=single + rounding, atol=single * size, equal_nan=True
    )


def same_codes(got: Tensor, want: Tensor, seldom: float = SELDOM) -> None:
    """Whole numbers of which few are the next one."""
    assert got.shape == want.shape
    assert got.stride() == want.stride()
    off = (got.int() - want.int()).abs()
    assert not off.numel() or (off.max() <= 1 and (off > 0).float().mean() <= seldom)


def same_copy(got: list[Tensor], want: list[Tensor], bits: int, tile_rows: int) -> None:
    """Copies are the same but for codes, zero points and scales that sums round elsewhere."""
    columns, rows = got[1].shape[1], got[0].numel() * 8 // bits // max(1, got[1].shape[1])
    codes = [unpack(t[0], bits, rows, columns) for t in (got, want)]
    torch.testing.assert_close(got[2], want[2], rtol=2**-7, atol=0)
    scaled = got[2] == want[2]
    assert scaled.float().mean() > 0.97
    # A tile of one row has a step so small that its zero point is large, and so rounded.
    off = (got[1].int() - want[1].int()).abs()[scaled]
    assert (off <= 1 + want[1][scaled].abs() * 2**-11).all()
    assert (off > 0).float().mean() < 0.05
    off = (codes[0].int() - codes[1].int()).abs()
    assert off.max() <= 1
    assert (off > 0).float().mean() < 5e-3


def same_product(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype
    assert (got - want).norm() <= 1e-2 * want.norm()


SLACK = {"float": 16, "sum": 100}
ALIKE: dict[str, Callable[[Tensor, Tensor], None]] = {
    "equal": equal,
    "int8": same_codes,
    "product": same_product,
}
