"""Kernels of ops.norm: statistics of rows, and the gradient from a few-bit copy of x_hat.

x_hat = (x - mean) rstd of x [rows, columns]; with g = dy weight, dx = rstd (g - mean(g) - x_hat
mean(g x_hat)) + residual, dweight = sum dy x_hat, dbias = sum dy; without means for RMSNorm.

norm_quantize runs two kernels. The first reads x for the statistics of its rows, unless they come
from `residual_add`; the second, one of `copies`, reads it again for y and the codes. A single
kernel would have to hold or reread whole tiles of rows, with some hundred programs for a batch, too
few to fill a card.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from razorctl.ops import kernels
from razorctl.ops import norm as op
from razorctl.ops.op import FewBitCopy
from razorctl.ops.packing import BITS
from razorctl.ops.triton import copies
from razorctl.ops.triton.int8 import codes_of, raised, row_scale
from razorctl.ops.triton.launch import cdiv, launchable, next_power_of_2
from razorctl.ops.triton.numbers import inverse
from razorctl.ops.triton.packing import unpacked_block
from razorctl.ops.triton.sums import column_sums
from razorctl.ops.triton.tiles import COPY, VECTOR, rows_of_tile, tile_affine
from razorctl.ops.triton.variants import DTYPES, KNOWN, Variant, dtypes

STATISTICS = {"R": 8, "C": 256}  # a warp has whole rows, so that no sum crosses warps
WIDEST = 4096  # most columns of a row that a program holds
ROWS = 64  # rows of a program of `norm_grad`, which computes them one by one
# Of them that are computed or being loaded, where a card can copy into shared memory meanwhile.
AHEAD = constexpr(4)
HELD = 2048  # elements of whole rows that a program holds, or one wider row


@launchable
def statistics_kernel(x, mean, rstd, rows, columns, stride, eps, R: tl.constexpr, C: tl.constexpr):
    """A program computes 1 / std of R rows, and the mean unless that is None."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    there = row < rows
    center = tl.zeros((R,), tl.float32)
    if mean is not None:
        total = tl.zeros((R, C), tl.float32)
        for start in range(0, columns, C):
            column = start + tl.arange(0, C)
            inside = there[:, None] & (column < columns)[None, :]
            src = x + row[:, None] * stride + column[None, :]
            total += tl.load(src, mask=inside, other=0.0).to(tl.float32)
        center = tl.sum(total, 1) / columns
        tl.store(mean + row, center, mask=there)
    squares = tl.zeros((R, C), tl.float32)
    for start in range(0, columns, C):
        column = start + tl.arange(0, C)
        inside = there[:, None] & (column < columns)[None, :]
        src = x + row[:, None] * stride + column[None, :]
        apart = tl.load(src, mask=inside, other=0.0).to(tl.float32) - center[:, None]
        squares += tl.where(inside, apart * apart, 0.0)
    deviation = tl.sqrt_rn(tl.sum(squares, 1) / columns + eps)
    tl.store(rstd + row, tl.div_rn(1.0, deviation), mask=there)


@triton.jit
def _row_statistics(values, mean, rstd, row, rows, columns, inside, eps):
    """Stores the statistics of whole rows; returns the rows less their mean, and 1 / std."""
    if mean is not None:
        center = tl.sum(values, 1) / columns
        tl.store(mean + row, center, mask=row < rows)
        values = tl.where(inside, values - center[:, None], 0.0)
    deviation = tl.sqrt_rn(tl.sum(values * values, 1) / columns + eps)
    factor = tl.div_rn(1.0, deviation)
    tl.store(rstd + row, factor, mask=row < rows)
    return values, factor


@launchable
def residual_add_kernel(
    x, f, y, mean, rstd, rows, columns, x_stride, f_stride, eps, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """A program computes R whole rows of y = x + f, and the statistics of y in its dtype."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, C)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    src = x + row[:, None] * x_stride + column[None, :]
    values = tl.load(src, mask=inside, other=0.0).to(tl.float32)
    src = f + row[:, None] * f_stride + column[None, :]
    values += tl.load(src, mask=inside, other=0.0).to(tl.float32)
    rounded = values.to(y.dtype.element_ty)
    tl.store(y + row[:, None] * columns + column[None, :], rounded, mask=inside)
    _row_statistics(rounded.to(tl.float32), mean, rstd, row, rows, columns, inside, eps)


@launchable
def normalize_kernel(
    x, weight, bias, y, mean, rstd, rows, columns, stride, eps, R: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """A program normalizes R whole rows, and leaves their statistics."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, C)
    there = column < columns
    inside = (row < rows)[:, None] & there[None, :]
    src = x + row[:, None] * stride + column[None, :]
    values = tl.load(src, mask=inside, other=0.0).to(tl.float32)
    values, factor = _row_statistics(values, mean, rstd, row, rows, columns, inside, eps)
    values *= factor[:, None]
    if weight is not None:
        values *= tl.load(weight + column, mask=there, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        values += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
    tl.store(y + row[:, None] * columns + column[None, :], values.to(y.dtype.element_ty), inside)


@launchable
def norm_grad_kernel(
    dy, packed, zero_point, scale, weight, rstd, residual, dx, codes, code_scale, sums,
    rows, columns, stride, tile_rows, residual_stride,
    CENTERS: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A program computes ROWS whole rows of a tile, one by one.

    sums: [2 or 4, programs, columns], receives the sums of dy x_hat and of dy. With `codes` also
    the sums of dx and its largest magnitudes, as in `int8.int8_rows_kernel`.
    """
    tile, first, last = rows_of_tile(tl.program_id(0), rows, tile_rows, ROWS)
    column = tl.arange(0, C)
    there = column < columns
    offset, spacing = tile_affine(zero_point, scale, None, tile, column, columns)
    if weight is not None:
        by = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)[None, :]
    dweight, dbias = tl.zeros((1, C), tl.float32), tl.zeros((1, C), tl.float32)
    total, most = tl.zeros((1, C), tl.float32), tl.zeros((1, C), tl.float32)
    STAGES: tl.constexpr = AHEAD if C <= 1024 else 1  # wider rows leave no registers for it
    for number in tl.range(first, last, num_stages=STAGES):
        row = number + tl.zeros((1,), tl.int64)
        src = dy + row[:, None] * stride + column[None, :]
        d = tl.load(src, mask=there[None, :], other=0.0).to(tl.float32)
        numbers = unpacked_block(packed, row, column, columns, there[None, :], BITS, V)
        x_hat = numbers.to(tl.float32) * spacing[None, :] + offset[None, :]
        g = d
        if weight is not None:
            g = d * by
        result = g - x_hat * (tl.sum(g * x_hat, 1) / columns)[:, None]
        if CENTERS:
            result -= (tl.sum(g, 1) / columns)[:, None]
        result *= tl.load(rstd + row)[:, None]
        if residual is not None:
            src = residual + row[:, None] * residual_stride + column[None, :]
            result += tl.load(src, mask=there[None, :], other=0.0).to(tl.float32)
        at = row[:, None] * columns + column[None, :]
        tl.store(dx + at, result, mask=there[None, :])
        if codes is not None:
            each = row_scale(result)
            factor = inverse(each)[:, None]
            tl.store(codes + at, codes_of(result, factor), mask=there[None, :])
            tl.store(code_scale + row, each)
            total += result
            most = raised(most, result, factor, each[:, None])
        dweight += d * x_hat
        dbias += d
    to = sums + tl.program_id(0).to(tl.int64) * columns + column[None, :]
    further = tl.num_programs(0).to(tl.int64) * columns
    tl.store(to, dweight, mask=there[None, :])
    tl.store(to + further, dbias, mask=there[None, :])
    if codes is not None:
        tl.store(to + 2 * further, total, mask=there[None, :])
        tl.store(to + 3 * further, most, mask=there[None, :])


def _whole_rows(columns: int) -> tuple[dict[str, int], int]:
    """The sizes of a program of `residual_add` or `normalize`, and its warps."""
    held = next_power_of_2(columns)
    rows = max(1, HELD // max(held, HELD // 8))
    return {"R": rows, "C": held}, 8 if held > HELD else 4


def takes_sum(x: Tensor, f: Tensor, eps: float, centers: bool) -> bool:
    """Whether the kernel of `residual_add` takes these arguments."""
    alike = x.shape == f.shape and x.stride(-1) == f.stride(-1) == 1
    single = x.dtype in KNOWN and f.dtype in KNOWN
    return alike and single and x.numel() > 0 and x.shape[-1] <= WIDEST


@kernels.register(op.residual_add, "cuda", takes_sum)
def residual_add(x: Tensor, f: Tensor, eps: float, centers: bool) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, f.dtype))
    x, f = x.reshape(-1, x.shape[-1]), f.reshape(-1, f.shape[-1])
    rows, columns = x.shape
    rstd = x.new_empty(rows, 1, dtype=torch.float32)
    mean = torch.empty_like(rstd) if centers else None
    sizes, warps = _whole_rows(columns)
    residual_add_kernel[(cdiv(rows, sizes["R"]),)](
        x, f, y, mean, rstd, rows, columns, x.stride(0), f.stride(0), eps,
        **sizes, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return y, rstd.new_empty(0) if mean is None else mean, rstd


@kernels.register(
    op.normalize,
    "cuda",
    lambda x, *_: (
        x.numel() > 0 and x.dtype in KNOWN and x.stride(-1) == 1 and x.shape[-1] <= WIDEST
    ),
)
def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centers: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=dtype)
    x = x.reshape(-1, x.shape[-1])
    rows, columns = x.shape
    rstd = x.new_empty(rows, 1, dtype=torch.float32)
    mean = torch.empty_like(rstd) if centers else None
    sizes, warps = _whole_rows(columns)
    normalize_kernel[(cdiv(rows, sizes["R"]),)](
        x, weight, bias, y, mean, rstd, rows, columns, x.stride(0), eps,
        **sizes, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return y, rstd.new_empty(0) if mean is None else mean, rstd


@kernels.register(op.norm_quantize, "cuda", lambda x, *_: copies.takes(x.reshape(-1, x.shape[-1])))
def norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centers: bool,
    bits: int,
    tile_rows: int,
    dtype: torch.dtype,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    flat = x.reshape(-1, x.shape[-1])
    y = x.new_empty(x.shape, dtype=dtype)
    if rstd is None:
        mean, used_rstd = _statistics(flat, eps, centers)
    else:
        mean, used_rstd = op.mean_or_none(mean), rstd
    copy = copies.make_copy(
        flat, bits, tile_rows, mean=mean, rstd=used_rstd, weight=weight, bias=bias, y=y
    )
    return y, used_rstd if rstd is None else used_rstd.new_empty(0), *copy


def _statistics(x: Tensor, eps: float, centers: bool) -> tuple[Tensor | None, Tensor]:
    """See `op.statistics`."""
    rows, columns = x.shape
    rstd = x.new_empty(rows, 1, dtype=torch.float32)
    mean = torch.empty_like(rstd) if centers else None
    statistics_kernel[(cdiv(rows, STATISTICS["R"]),)](
        x, mean, rstd, rows, columns, x.stride(0), eps, **STATISTICS, num_warps=4, num_stages=1
    )
    return mean, rstd


def _held(columns: int) -> tuple[int, int]:
    """The columns that a program of `norm_grad` holds, and its warps."""
    held = next_power_of_2(columns)
    return held, min(16, max(4, held // 256))


def _grad(
    dy: Tensor,
    copy: FewBitCopy,
    weight: Tensor | None,
    rstd: Tensor,
    centers: bool,
    residual: Tensor | None,
    codes: Tensor | None = None,
    code_scale: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """dx, the gradients of weight and bias, and statistics of dx's columns if there are `codes`.

    Fills codes [rows, columns] and code_scale [rows, 1] with the int8 copy of dx.
    """
    packed, zero_point, scale, bits, tile_rows, _ = copy
    rows, columns = dy.shape
    dx = rstd.new_empty(rows, columns)
    programs = scale.shape[0] * cdiv(tile_rows, ROWS)
    kinds = 2 if codes is None else 4
    sums = dy.new_empty(kinds, programs, columns, dtype=torch.float32)
    held, warps = _held(columns)
    norm_grad_kernel[(programs,)](
        dy, packed, zero_point, scale, weight, rstd, residual, dx, codes, code_scale, sums,
        rows, columns, dy.stride(0), tile_rows, columns if residual is None else residual.stride(0),
        CENTERS=centers, BITS=bits, ROWS=ROWS, C=held, V=VECTOR // dy.dtype.itemsize,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return dx, *column_sums(sums, largest=codes is not None)


def takes_grad(
    dy: Tensor,
    copy: FewBitCopy,
    weight: Tensor | None,
    rstd: Tensor,
    centers: bool,
    residual: Tensor | None = None,
) -> bool:
    """Whether the kernels take a gradient."""
    fits = residual is None or copies.takes(residual)
    single = rstd.dtype == torch.float32 and copy.bias is None
    return copies.takes(dy) and fits and dy.shape[1] <= WIDEST and single


@kernels.register(op.norm_grad, "cuda", takes_grad)
def norm_grad(
    dy: Tensor,
    copy: FewBitCopy,
    weight: Tensor | None,
    rstd: Tensor,
    centers: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _grad(dy, copy, weight, rstd, centers, residual)
    return dx, dweight, dbias


@kernels.register(op.norm_grad_int8, "cuda", takes_grad)
def norm_grad_int8(
    dy: Tensor,
    copy: FewBitCopy,
    weight: Tensor | None,
    rstd: Tensor,
    centers: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    codes, code_scale = dy.new_empty(dy.shape, dtype=torch.int8), rstd.new_empty(dy.shape[0], 1)
    dx, dweight, dbias, total, largest = _grad(
        dy, copy, weight, rstd, centers, residual, codes=codes, code_scale=code_scale
    )
    return dx, dweight, dbias, codes, code_scale, total, largest


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """The variants that this file launches."""
    for dtype in dtypes(capability, every):
        signature = {"x": f"*{dtype}", "mean": "*fp32", "rstd": "*fp32", **_ROWS, "stride": "i32"}
        signature["eps"] = "fp32"
        yield Variant(statistics_kernel, signature, STATISTICS, 4, 1, f"statistics {dtype}")
        yield from _of_whole_rows(dtype, every)
        yield from copies.copy_variants(dtype, BITS if every else (5,), norm=True, every=every)
        if every and dtype != "fp32":  # of a residual stream in single precision
            yield from copies.copy_variants("fp32", BITS, norm=True, every=True, y=dtype)
        for bits in BITS if every else (5,):
            yield from _gradients(dtype, bits, every)


_ROWS = {"rows": "i32", "columns": "i32"}


def _of_whole_rows(dtype: str, every: bool) -> Iterator[Variant]:
    for columns in (64, 1024, 2048, WIDEST) if every else (WIDEST,):
        sizes, warps = _whole_rows(columns)
        yield Variant(
            residual_add_kernel,
            {"x": "*fp32", "f": f"*{dtype}", "y": "*fp32", "mean": "*fp32", "rstd": "*fp32"}
            | _ROWS | {"x_stride": "i32", "f_stride": "i32", "eps": "fp32"},
            sizes, warps, 1, f"residual_add {columns} {dtype}",
        )  # fmt: skip
        floats = dict.fromkeys(("weight", "bias"), "*fp32")
        yield Variant(
            normalize_kernel,
            {"x": "*fp32", **floats, "y": f"*{dtype}", "mean": "*fp32", "rstd": "*fp32"}
            | _ROWS | {"stride": "i32", "eps": "fp32"},
            sizes, warps, 1, f"normalize {columns} {dtype}",
        )  # fmt: skip


def _gradients(dtype: str, bits: int, every: bool) -> Iterator[Variant]:
    floats = dict.fromkeys(("weight", "rstd", "residual", "dx"), "*fp32")
    copy = {"codes": "*i8", "code_scale": "*fp32"}
    shape = _ROWS | dict.fromkeys(("stride", "tile_rows", "residual_stride"), "i32")
    width, suffix = VECTOR // DTYPES[dtype].itemsize, "" if bits == 5 else f" {bits} bits"
    for columns in (1024, 2048, WIDEST) if every else (WIDEST,):
        held, warps = _held(columns)
        sizes = {"CENTERS": True, "BITS": bits, "ROWS": ROWS, "C": held, "V": width}
        for int8 in (False, True) if every else (True,):
            int8_copy = copy if int8 else {}
            yield Variant(
                norm_grad_kernel,
                {"dy": f"*{dtype}", **COPY, **floats, **int8_copy, "sums": "*fp32", **shape},
                dict.fromkeys(copy.keys() - int8_copy.keys()) | sizes, warps, 1,
                f"norm_grad{'_int8' if int8 else ''} {columns} {dtype}{suffix}",
            )  # fmt: skip
