"""Kernels of ops.int8: int8 copies of x [rows, columns] by rows, and by columns.

scale = max |x| / 127 of a row or a column, code = round(x / scale).
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from razorctl.ops import int8 as op
from razorctl.ops import kernels
from razorctl.ops.triton.launch import cdiv, launchable, next_power_of_2
from razorctl.ops.triton.numbers import inverse, larger, low_byte, magnitude
from razorctl.ops.triton.sums import column_sums
from razorctl.ops.triton.sums import variant as sums_variant
from razorctl.ops.triton.tiles import VECTOR
from razorctl.ops.triton.variants import DTYPES, KNOWN, Variant, dtypes

LEVELS = constexpr(op.LEVELS)
LARGEST = constexpr(torch.finfo(torch.float32).max)
WIDEST = 16384  # most columns of a row that a program holds
WIDEST_HEADS = 4096  # most columns of all heads of q; a program also holds k and v
ROWS = 32  # rows that a program of `int8_heads` copies, and at most one of `int8_rows`, one by one
STAGES = constexpr(3)  # rows of `int8_heads` that are copied or being loaded
PROGRAMS = 512  # of `int8_rows` where there are so few rows, as of a weight, that each has less
TILE = {"R": 128, "C": 64}  # of the programs that transpose
TILE_WARPS = 8
COLUMNS_REGISTERS = 64  # of a thread: without a limit ptxas may take 40 and spill


@triton.jit
def scale_of(bits):
    """The scale of values up to a magnitude, given by its bits; NaN for NaN."""
    scale = tl.div_rn(tl.minimum(bits.to(tl.float32, bitcast=True), LARGEST), 127.0)
    return tl.where(bits > 0x7F800000, float("nan"), scale)


@triton.jit
def row_scale(x):
    """The scale of each row of `x`, along the last axis; NaN for a row with NaN."""
    return scale_of(tl.max(magnitude(x), len(x.shape) - 1))


@triton.jit
def codes_of(x, factor):
    """x factor, rounded to nearest, as int8."""
    return low_byte(tl.minimum(tl.maximum(x * factor, -LEVELS), LEVELS))


@triton.jit
def root(row_scale):
    """See `op.roots`."""
    return tl.sqrt(tl.where(row_scale > 0, row_scale, 0.0))


@triton.jit
def raised(most, x, factor, row_scale):
    """The elementwise maximum of `most` and |x| over the root of its row's scale.

    factor: 1 / row_scale.
    """
    return larger(most, tl.abs(x * factor * tl.sqrt(tl.maximum(row_scale, 0.0))))


@launchable
def int8_rows_kernel(
    x, codes, scale, sums, rows, columns, stride, each, C: tl.constexpr, V: tl.constexpr
):
    """A program copies `each` whole rows, one by one.

    sums: [2, programs, columns], receives the sum of the rows, and the largest magnitudes of x
    over the roots of its row scales. V: columns that a thread loads and stores at once.
    """
    column = tl.max_contiguous(tl.arange(0, C), V)
    there = column < columns
    first = tl.program_id(0).to(tl.int64) * each
    total = tl.zeros((C,), tl.float32)
    most = total
    for row in range(first, tl.minimum(first + each, rows)):
        values = tl.load(x + row * stride + column, mask=there, other=0.0).to(tl.float32)
        spacing = row_scale(values)
        factor = inverse(spacing)
        tl.store(scale + row, spacing)
        total += values
        most = raised(most, values, factor, spacing)
        tl.store(codes + row * columns + column, codes_of(values, factor), mask=there)
    to = sums + tl.program_id(0).to(tl.int64) * columns + column
    tl.store(to, total, mask=there)
    to += tl.num_programs(0).to(tl.int64) * columns
    tl.store(to, most, mask=there)


@launchable
def int8_heads_kernel(
    q, k, v, codes, scale, sums, rows, tokens, width, columns,
    batch_stride, head_stride, token_stride,
    ROWS: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """`int8_rows_kernel` for rows in pieces of `width` columns, the heads of q, k and v.

    columns: of all heads of q; C columns are held of each of q, k and v. V divides width and the
    strides.
    """
    column = tl.max_contiguous(tl.arange(0, C), V)
    at = column // width * head_stride + column % width
    at = tl.max_contiguous(tl.multiple_of(at, V), V)
    there = column < columns
    first = tl.program_id(0).to(tl.int64) * ROWS
    of_q = tl.zeros((C,), tl.float32)
    of_k, of_v, most_q, most_k, most_v = of_q, of_q, of_q, of_q, of_q
    for row in tl.range(first, tl.minimum(first + ROWS, rows), num_stages=STAGES):
        start = row // tokens * batch_stride + row % tokens * token_stride
        in_q = tl.load(q + start + at, mask=there, other=0.0).to(tl.float32)
        in_k = tl.load(k + start + at, mask=there, other=0.0).to(tl.float32)
        in_v = tl.load(v + start + at, mask=there, other=0.0).to(tl.float32)
        most = larger(larger(tl.abs(in_q), tl.abs(in_k)), tl.abs(in_v))
        spacing = scale_of(tl.max(magnitude(most), 0))
        factor = inverse(spacing)
        to = codes + row * 3 * columns + column
        tl.store(to, codes_of(in_q, factor), mask=there)
        tl.store(to + columns, codes_of(in_k, factor), mask=there)
        tl.store(to + 2 * columns, codes_of(in_v, factor), mask=there)
        tl.store(scale + row, spacing)
        of_q += in_q
        of_k += in_k
        of_v += in_v
        most_q = raised(most_q, in_q, factor, spacing)
        most_k = raised(most_k, in_k, factor, spacing)
        most_v = raised(most_v, in_v, factor, spacing)
    to = sums + tl.program_id(0).to(tl.int64) * 3 * columns + column
    tl.store(to, of_q, mask=there)
    tl.store(to + columns, of_k, mask=there)
    tl.store(to + 2 * columns, of_v, mask=there)
    to += tl.num_programs(0).to(tl.int64) * 3 * columns
    tl.store(to, most_q, mask=there)
    tl.store(to + columns, most_k, mask=there)
    tl.store(to + 2 * columns, most_v, mask=there)


@triton.jit
def _tile(number, rows, columns, R: tl.constexpr, C: tl.constexpr):
    """The rows, int64, and columns of a block, and its mask."""
    across = tl.cdiv(columns, C)
    row = (number // across).to(tl.int64) * R + tl.arange(0, R)
    column = number % across * C + tl.arange(0, C)
    return row, column, (row < rows)[:, None] & (column < columns)[None, :]


@triton.jit
def largest_of(partial, blocks, column, there, columns):
    """The bits of the largest magnitude of each column in [blocks, columns]."""
    largest = tl.zeros((16, column.shape[0]), tl.int32)
    for first in range(0, blocks, 16):
        block = first + tl.arange(0, 16)
        src = partial + block[:, None] * columns + column[None, :]
        values = tl.load(src, mask=(block < blocks)[:, None] & there[None, :], other=0.0)
        largest = tl.maximum(largest, magnitude(values))
    return tl.max(largest, 0)


@triton.jit
def leave_largest(number, x, partial, rows, columns, stride, R: tl.constexpr, C: tl.constexpr):
    """Stores the largest magnitude of each column of a block of R rows; NaN is the largest."""
    row, column, inside = _tile(number, rows, columns, R, C)
    values = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0)
    block = number // tl.cdiv(columns, C)
    to = partial + block.to(tl.int64) * columns + column
    largest = tl.max(magnitude(values.to(tl.float32)), 0).to(tl.float32, bitcast=True)
    tl.store(to, largest, mask=column < columns)


@launchable
def largest_kernel(x, partial, rows, columns, stride, R: tl.constexpr, C: tl.constexpr):
    """See `leave_largest`."""
    leave_largest(tl.program_id(0), x, partial, rows, columns, stride, R, C)


@launchable
def int8_columns_kernel(
    x, partial, codes, scale, rows, columns, stride, R: tl.constexpr, C: tl.constexpr
):
    """Copies a block, transposed; partial [blocks, columns] has magnitudes of its columns."""
    row, column, inside = _tile(tl.program_id(0), rows, columns, R, C)
    there = column < columns
    spacing = scale_of(largest_of(partial, tl.cdiv(rows, R), column, there, columns))
    if tl.program_id(0) < tl.cdiv(columns, C):
        tl.store(scale + column, spacing, mask=there)
    src = x + row[:, None] * stride + column[None, :]
    values = tl.load(src, mask=inside, other=0).to(tl.float32)
    to = codes + column[None, :].to(tl.int64) * rows + row[:, None]
    tl.store(to, codes_of(values, inverse(spacing)[None, :]), mask=inside)


def warps_of_row(columns: int) -> int:
    """The warps of a program that holds a row at once."""
    return min(16, max(4, columns // 256))


def takes(x: Tensor) -> bool:
    """Whether the kernels of `int8_rows` and `int8_columns` take `x`."""
    return x.numel() > 0 and x.dtype in KNOWN and x.stride(1) == 1 and x.shape[1] <= WIDEST


@kernels.register(op.int8_rows, "cuda", takes)
def int8_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    codes = x.new_empty(rows, columns, dtype=torch.int8)
    scale = x.new_empty(rows, 1, dtype=torch.float32)
    each = min(ROWS, cdiv(rows, PROGRAMS))
    sums = x.new_empty(2, cdiv(rows, each), columns, dtype=torch.float32)
    held = next_power_of_2(columns)
    int8_rows_kernel[(sums.shape[1],)](
        x, codes, scale, sums, rows, columns, x.stride(0), each,
        C=held, V=VECTOR // x.dtype.itemsize, num_warps=warps_of_row(held), num_stages=1,
    )  # fmt: skip
    total, largest = column_sums(sums, largest=True)
    return codes, scale, total, largest


def takes_heads(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernel of `int8_heads` takes these."""
    group = VECTOR // q.dtype.itemsize
    return (
        q.numel() > 0
        and q.dtype == k.dtype == v.dtype
        and q.dtype in KNOWN
        and q.stride() == k.stride() == v.stride()
        and q.stride(3) == 1
        and not any(size % group for size in (q.shape[3], *q.stride()[:3]))
        and q.shape[1] * q.shape[3] <= WIDEST_HEADS
    )


@kernels.register(op.int8_heads, "cuda", takes_heads)
def int8_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, tokens, width = q.shape
    rows, columns = batch * tokens, heads * width
    codes = q.new_empty(rows, 3 * columns, dtype=torch.int8)
    scale = q.new_empty(rows, 1, dtype=torch.float32)
    sums = q.new_empty(2, cdiv(rows, ROWS), 3 * columns, dtype=torch.float32)
    held = next_power_of_2(columns)
    int8_heads_kernel[(sums.shape[1],)](
        q, k, v, codes, scale, sums, rows, tokens, width, columns, *q.stride()[:3],
        ROWS=ROWS, C=held, V=VECTOR // q.dtype.itemsize, num_warps=warps_of_row(held), num_stages=1,
    )  # fmt: skip
    total, largest = column_sums(sums, largest=True)
    return codes, scale, total, largest


def _programs(rows: int, columns: int) -> tuple[int]:
    return (cdiv(rows, TILE["R"]) * cdiv(columns, TILE["C"]),)


@kernels.register(
    op.int8_columns,
    "cuda",
    lambda x, factor=None, largest=None: takes(x) and factor is None and largest is None,
)
def int8_columns(
    x: Tensor, factor: Tensor | None = None, largest: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    shape = rows, columns, x.stride(0)
    codes = x.new_empty(columns, rows, dtype=torch.int8)
    scale = x.new_empty(columns, dtype=torch.float32)
    partial = scale.new_empty(cdiv(rows, TILE["R"]), columns)
    grid, options = _programs(rows, columns), {"num_warps": TILE_WARPS, "num_stages": 1}
    largest_kernel[grid](x, partial, *shape, **TILE, **options)
    options["maxnreg"] = COLUMNS_REGISTERS
    int8_columns_kernel[grid](x, partial, codes, scale, *shape, **TILE, **options)
    return codes, scale


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """The variants that this file launches."""
    shape = {"rows": "i32", "columns": "i32", "stride": "i32"}
    yield sums_variant()
    for dtype in dtypes(capability, every):
        x = {"x": f"*{dtype}"}
        result = {"codes": "*i8", "scale": "*fp32"}
        group = VECTOR // DTYPES[dtype].itemsize
        for held in (1024, 2048, 4096, 8192, WIDEST) if every else (WIDEST,):
            signature = {**x, **result, "sums": "*fp32", **shape, "each": "i32"}
            sizes = {"C": held, "V": group}
            label = f"int8_rows {held} {dtype}"
            yield Variant(int8_rows_kernel, signature, sizes, warps_of_row(held), 1, label)
        pointers = dict.fromkeys(("q", "k", "v"), f"*{dtype}") | result | {"sums": "*fp32"}
        sizes_of = ("rows", "tokens", "width", "columns")
        strides = ("batch_stride", "head_stride", "token_stride")
        for held in (256, 1024, 2048, WIDEST_HEADS) if every else (WIDEST_HEADS,):
            signature = pointers | dict.fromkeys((*sizes_of, *strides), "i32")
            sizes = {"ROWS": ROWS, "C": held, "V": group}
            label = f"int8_heads {held} {dtype}"
            yield Variant(int8_heads_kernel, signature, sizes, warps_of_row(held), 1, label)
        signature = {**x, "partial": "*fp32", **shape}
        yield Variant(largest_kernel, signature, TILE, TILE_WARPS, 1, f"largest {dtype}")
        signature = {**x, "partial": "*fp32", **result, **shape}
        yield Variant(
            int8_columns_kernel, signature, TILE, TILE_WARPS, 1, f"int8_columns {dtype}",
            most_registers=COLUMNS_REGISTERS,
        )  # fmt: skip
