"""Kernels of ops.activation: y = f(x) with a copy of x, and dx = f'(x) dy, all [rows, columns].

The kernels of `copies` make the copy and store f(x) as well.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from razorctl.ops import activation as op
from razorctl.ops import kernels
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.op import FewBitCopy
from razorctl.ops.packing import BITS
from razorctl.ops.triton import copies, int8
from razorctl.ops.triton.int8 import codes_of, raised, scale_of
from razorctl.ops.triton.launch import all_registers, cdiv, launchable
from razorctl.ops.triton.numbers import inverse, larger, magnitude, short_slope, slope
from razorctl.ops.triton.packing import unpacked_block
from razorctl.ops.triton.sums import column_sums
from razorctl.ops.triton.tiles import (
    COPY,
    SHAPE,
    VECTOR,
    block,
    block_count,
    block_of_tile,
    chunks_of,
    rows_of_tile,
    tile_affine,
)
from razorctl.ops.triton.variants import DTYPES, Variant, dtypes

WIDEST = 5120  # columns of a row that a program of `activation_grad_int8` holds at once
ROWS = 32  # that it works on one after the other


@launchable
def activation_grad_kernel(
    dy, packed, zero_point, scale, dx, rows, columns, stride, tile_rows,
    FUNCTION: tl.constexpr, BITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A program has R rows of a tile and C columns; a thread loads V columns at once."""
    tile, row, column, inside = block_of_tile(rows, columns, tile_rows, R, C)
    codes = unpacked_block(packed, row, column, columns, inside, BITS, V)
    offset, spacing = tile_affine(zero_point, scale, None, tile, column, columns)
    x = codes.to(tl.float32) * spacing[None, :] + offset[None, :]
    src = dy + row[:, None] * stride + column[None, :]
    result = tl.load(src, mask=inside, other=0.0).to(tl.float32) * slope(x, FUNCTION)
    to = dx + row[:, None] * columns + column[None, :]
    tl.store(to, result.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _row_of_grad(
    dy, packed, offset, spacing, row, column, columns, inside, stride,
    FUNCTION: tl.constexpr, BITS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A chunk of a row of dx, rounded to its dtype, of which the int8 copy is made."""
    numbers = unpacked_block(packed, row, column, columns, inside, BITS, V)
    x = numbers.to(tl.float32) * spacing[None, :] + offset[None, :]
    src = dy + row[:, None] * stride + column[None, :]
    dx = tl.load(src, mask=inside, other=0.0).to(tl.float32) * short_slope(x, FUNCTION)
    return dx.to(dy.dtype.element_ty).to(tl.float32)


@triton.jit
def _larger_of_both(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def _store_sums(sums, total, most, columns, C: tl.constexpr, CHUNKS: tl.constexpr):
    for i in tl.static_range(CHUNKS):
        column = i * C + tl.arange(0, C)
        inside = (column < columns)[None, :]
        to = sums + tl.program_id(0).to(tl.int64) * columns + column[None, :]
        tl.store(to, total[i], mask=inside)
        tl.store(to + tl.num_programs(0).to(tl.int64) * columns, most[i], mask=inside)


@launchable
def activation_grad_int8_kernel(
    dy, packed, zero_point, scale, codes, code_scale, sums,
    rows, columns, stride, tile_rows,
    FUNCTION: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A program computes ROWS whole rows of a tile, two at a time, in chunks of C columns.

    Two share offsets, scales and barriers. sums: as of `int8.int8_rows_kernel`.
    """
    tile, first, last = rows_of_tile(tl.program_id(0), rows, tile_rows, ROWS)
    zeros = tl.zeros((1, C), tl.float32)
    total, most = (), ()
    for _ in tl.static_range(CHUNKS):
        total += (zeros,)
        most += (zeros,)
    for number in range(first, last, 2):
        row = number + tl.zeros((1,), tl.int64)
        both = (row + 1 < last)[:, None]
        top, next_top = zeros, zeros
        dx, next_dx, raised_total = (), (), ()
        for i in tl.static_range(CHUNKS):
            column = i * C + tl.arange(0, C)
            inside = (column < columns)[None, :]
            offset, spacing = tile_affine(zero_point, scale, None, tile, column, columns)
            a = _row_of_grad(
                dy, packed, offset, spacing, row, column, columns, inside, stride,
                FUNCTION, BITS, V,
            )  # fmt: skip
            b = _row_of_grad(
                dy, packed, offset, spacing, row + 1, column, columns, inside & both, stride,
                FUNCTION, BITS, V,
            )  # fmt: skip
            top, next_top = larger(top, tl.abs(a)), larger(next_top, tl.abs(b))
            dx += (a,)
            next_dx += (b,)
            raised_total += (total[i] + a + b,)
        total = raised_total
        tops = tl.reduce((magnitude(top), magnitude(next_top)), 1, _larger_of_both)
        each, next_each = scale_of(tops[0]), scale_of(tops[1])
        factor, next_factor = inverse(each)[:, None], inverse(next_each)[:, None]
        raised_most = ()
        for i in tl.static_range(CHUNKS):
            column = i * C + tl.arange(0, C)
            inside = (column < columns)[None, :]
            to = codes + row[:, None] * columns + column[None, :]
            tl.store(to, codes_of(dx[i], factor), mask=inside)
            tl.store(to + columns, codes_of(next_dx[i], next_factor), mask=inside & both)
            raised_most += (
                raised(
                    raised(most[i], dx[i], factor, each[:, None]),
                    next_dx[i], next_factor, next_each[:, None],
                ),
            )  # fmt: skip
        most = raised_most
        tl.store(code_scale + row, each)
        tl.store(code_scale + row + 1, next_each, mask=row + 1 < last)
    _store_sums(sums, total, most, columns, C, CHUNKS)


def takes_grad(dy: Tensor, copy: FewBitCopy, function: str) -> bool:
    """Whether the kernels take a gradient."""
    return copies.takes(dy) and copy.bias is None


@kernels.register(op.activation_grad, "cuda", takes_grad)
def activation_grad(dy: Tensor, copy: FewBitCopy, function: str) -> Tensor:
    """`op.activation_grad`, computed in single precision."""
    packed, zero_point, scale, bits, tile_rows, _ = copy
    rows, columns = dy.shape
    dx = dy.new_empty(rows, columns)
    sizes, warps = block(dy.dtype)
    activation_grad_kernel[(block_count(rows, columns, tile_rows, sizes),)](
        dy, packed, zero_point, scale, dx, rows, columns, dy.stride(0), tile_rows,
        FUNCTION=function, BITS=bits, **sizes, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return dx


def _sizes(columns: int, dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """The sizes of a program of `activation_grad_int8`, and its warps."""
    width, chunks = chunks_of(columns)
    sizes = {"ROWS": ROWS, "C": width, "CHUNKS": chunks, "V": VECTOR // dtype.itemsize}
    return sizes, max(2, width // 128)


@kernels.register(
    op.activation_grad_int8,
    "cuda",
    lambda dy, *others: takes_grad(dy, *others) and dy.shape[1] <= int8.WIDEST,
)
def activation_grad_int8(
    dy: Tensor, copy: FewBitCopy, function: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = dy.shape
    if columns > WIDEST:
        return int8.int8_rows(activation_grad(dy, copy, function))
    packed, zero_point, scale, bits, tile_rows, _ = copy
    codes = dy.new_empty(rows, columns, dtype=torch.int8)
    each = dy.new_empty(rows, 1, dtype=torch.float32)
    programs = scale.shape[0] * cdiv(tile_rows, ROWS)
    sums = each.new_empty(2, programs, columns)
    sizes, warps = _sizes(columns, dy.dtype)
    activation_grad_int8_kernel[(programs,)](
        dy, packed, zero_point, scale, codes, each, sums,
        rows, columns, dy.stride(0), tile_rows,
        FUNCTION=function, BITS=bits, **sizes,
        num_warps=warps, num_stages=1, maxnreg=all_registers(warps),
    )  # fmt: skip
    total, largest = column_sums(sums, largest=True)
    return codes, each, total, largest


@kernels.register(
    op.activation_quantize, "cuda", lambda x, *_: copies.takes(x.reshape(-1, x.shape[-1]))
)
def activation_quantize(
    x: Tensor, function: str, bits: int, tile_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape)
    rows = x.reshape(-1, x.shape[-1])
    copy = copies.make_copy(rows, bits, tile_rows, function=function, y=y)
    return y, *copy


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """The variants that this file launches."""
    chosen = BITS if every else (5,)
    for dtype in dtypes(capability, every):
        for function in FUNCTIONS if every else ("gelu",):
            for bits in chosen:
                yield from _gradients(dtype, function, bits, every)
            yield from copies.copy_variants(dtype, chosen, function=function, every=every)


def _gradients(dtype: str, function: str, bits: int, every: bool) -> Iterator[Variant]:
    signature = {"dy": f"*{dtype}", **COPY}
    constants, label = {"FUNCTION": function, "BITS": bits}, f"{function} {bits} bits {dtype}"
    sizes, warps = block(DTYPES[dtype])
    yield Variant(
        activation_grad_kernel,
        {**signature, "dx": f"*{dtype}", **SHAPE},
        constants | sizes,
        warps,
        1,
        f"activation_grad {label}",
    )
    for columns in (256, 768, 1536, 3072, 4096, WIDEST) if every else (WIDEST,):
        sizes, warps = _sizes(columns, DTYPES[dtype])
        yield Variant(
            activation_grad_int8_kernel,
            {**signature, "codes": "*i8", "code_scale": "*fp32", "sums": "*fp32", **SHAPE},
            constants | sizes,
            warps,
            1,
            f"activation_grad_int8 {columns} {label}",
            most_registers=all_registers(warps),
        )
