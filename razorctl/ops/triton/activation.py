"""Kernels of ops.activation: y = f(x) with a copy of x, and dx = f'(x) dy, all [rows, columns].

The kernels of `copies` make the copy and store f(x) as well.
"""

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from razorctl.ops import activation as op
from razorctl.ops import kernels
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.op import FewBitCopy
from razorctl.ops.packing import BITS
from razorctl.ops.triton import copies, int8
from razorctl.ops.triton.int8 import codes_of, raised, row_scale
from razorctl.ops.triton.launch import all_registers, cdiv, launchable, next_power_of_2
from razorctl.ops.triton.numbers import inverse, slope
from razorctl.ops.triton.packing import unpacked_block
from razorctl.ops.triton.sums import column_sums
from razorctl.ops.triton.tiles import (
    AHEAD,
    COPY,
    SHAPE,
    VECTOR,
    block,
    block_count,
    block_of_tile,
    tile_affine,
)
from razorctl.ops.triton.variants import DTYPES, Variant, dtypes

WIDEST = 16384  # bytes of a row that a program of `activation_grad_int8` holds at once
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


@launchable
def activation_grad_int8_kernel(
    dy, packed, zero_point, scale, codes, code_scale, sums,
    rows, columns, stride, tile_rows,
    FUNCTION: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A program computes ROWS whole rows of a tile, one by one.

    sums: as of `int8.int8_rows_kernel`.
    """
    along = tl.cdiv(tile_rows, ROWS)
    tile = (tl.program_id(0) // along).to(tl.int64)
    start = tl.program_id(0) % along * ROWS
    first = tile * tile_rows + start
    last = tl.minimum(first + tl.minimum(ROWS, tile_rows - start), rows)
    column = tl.arange(0, C)
    inside = (column < columns)[None, :]
    total, most = tl.zeros((1, C), tl.float32), tl.zeros((1, C), tl.int32)
    for number in tl.range(first, last, num_stages=AHEAD):
        row = number + tl.zeros((1,), tl.int64)
        numbers = unpacked_block(packed, row, column, columns, inside, BITS, V)
        # Loaded again, from a cache, for each row: a thread has no registers left for them.
        offset, spacing = tile_affine(zero_point, scale, None, tile, column, columns)
        x = numbers.to(tl.float32) * spacing[None, :] + offset[None, :]
        src = dy + row[:, None] * stride + column[None, :]
        result = tl.load(src, mask=inside, other=0.0).to(tl.float32) * slope(x, FUNCTION)
        # The int8 copy is made of the gradient in its dtype.
        result = result.to(dy.dtype.element_ty).to(tl.float32)
        at = row[:, None] * columns + column[None, :]
        each = row_scale(result)
        factor = inverse(each)[:, None]
        tl.store(codes + at, codes_of(result, factor), mask=inside)
        tl.store(code_scale + row, each)
        total += result
        most = raised(most, result, factor, each[:, None])
    to = sums + tl.program_id(0).to(tl.int64) * columns + column[None, :]
    tl.store(to, total, mask=inside)
    to += tl.num_programs(0).to(tl.int64) * columns
    tl.store(to, most.to(tl.float32, bitcast=True), mask=inside)


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


def _held(columns: int, dtype: torch.dtype, bits: int, function: str) -> tuple[int, int, int]:
    """The columns that a program of `activation_grad_int8` holds, its warps and most registers."""
    held = next_power_of_2(columns)
    warps = min(16, max(4, held // 256))
    # Some variants spill without a limit though two programs fit, others only with a limit.
    spills = dtype == torch.float32 or held > 4096 or (function == "gelu-tanh" and bits == 6)
    return held, warps, all_registers(warps if spills else 2 * warps)


@kernels.register(
    op.activation_grad_int8,
    "cuda",
    lambda dy, *others: takes_grad(dy, *others) and dy.shape[1] <= int8.WIDEST,
)
def activation_grad_int8(
    dy: Tensor, copy: FewBitCopy, function: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = dy.shape
    if columns * dy.itemsize > WIDEST:
        return int8.int8_rows(activation_grad(dy, copy, function))
    packed, zero_point, scale, bits, tile_rows, _ = copy
    codes = dy.new_empty(rows, columns, dtype=torch.int8)
    each = dy.new_empty(rows, 1, dtype=torch.float32)
    programs = scale.shape[0] * cdiv(tile_rows, ROWS)
    sums = each.new_empty(2, programs, columns)
    held, warps, most = _held(columns, dy.dtype, bits, function)
    activation_grad_int8_kernel[(programs,)](
        dy, packed, zero_point, scale, codes, each, sums,
        rows, columns, dy.stride(0), tile_rows,
        FUNCTION=function, BITS=bits, ROWS=ROWS, C=held, V=VECTOR // dy.dtype.itemsize,
        num_warps=warps, num_stages=1, maxnreg=most,
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
    widest = WIDEST // DTYPES[dtype].itemsize
    for columns in sorted({1024, 2048, 4096, widest}) if every else (widest,):
        held, warps, most = _held(columns, DTYPES[dtype], bits, function)
        yield Variant(
            activation_grad_int8_kernel,
            {**signature, "codes": "*i8", "code_scale": "*fp32", "sums": "*fp32", **SHAPE},
            constants | {"ROWS": ROWS, "C": held, "V": VECTOR // DTYPES[dtype].itemsize},
            warps,
            1,
            f"activation_grad_int8 {columns} {label}",
            most_registers=most,
        )
