"""Kernels of ops.int8_operand: a scale for each column, from its tiles' scales, then the codes.

codes [columns, rows] = round(row_scale (f(x) - center) / scale), for x [rows, columns] of a copy.
"""

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from razorctl.ops import int8_operand as op
from razorctl.ops import kernels
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.int8 import LEVELS as CODES
from razorctl.ops.op import FewBitCopy
from razorctl.ops.packing import BITS, GROUP
from razorctl.ops.triton.launch import cdiv, launchable
from razorctl.ops.triton.numbers import activated, inverse, low_byte
from razorctl.ops.triton.packing import unpacked_block
from razorctl.ops.triton.tiles import COPY, PARTS, block_count, block_of_tile, tile_affine
from razorctl.ops.triton.variants import Variant

LEVELS = constexpr(CODES)
BOUNDS = {"T": 64, "C": 32, "N": 4096}
STAGES = constexpr(3)  # parts of the rows' scales that are compared or being loaded
VECTOR = 8  # columns whose bytes a thread loads at once


@triton.jit
def bounds(
    zero_point,
    scale,
    bias,
    tiles,
    column,
    there,
    columns,
    BITS: tl.constexpr,
    FUNCTION: tl.constexpr,
    LOWEST: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """The middle of the range of each column's values, and half its width, [C]."""
    low = tl.full((T, C), float("inf"), tl.float32)
    high = -low
    shift = tl.zeros((C,), tl.float32)
    if bias is not None:
        shift += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    for start in range(0, tiles, T):
        tile = start + tl.arange(0, T)
        inside = (tile < tiles)[:, None] & there[None, :]
        at = tile[:, None].to(tl.int64) * columns + column[None, :]
        spacing = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
        zero = tl.load(zero_point + at, mask=inside, other=0).to(tl.float32)
        first = zero * (-1 / PARTS) * spacing + shift[None, :]
        last = first + (2**BITS - 1) * spacing
        least, most = tl.minimum(first, last), tl.maximum(first, last)
        if FUNCTION is not None:  # f falls up to LOWEST and rises from it
            between = tl.minimum(tl.maximum(least, LOWEST), most)
            ends = tl.maximum(tl.abs(activated(least, FUNCTION)), tl.abs(activated(most, FUNCTION)))
            most = tl.maximum(ends, tl.abs(activated(between, FUNCTION)))
        low = tl.minimum(low, tl.where(inside, least, float("inf")))
        high = tl.maximum(high, tl.where(inside, most, float("-inf")))
    if FUNCTION is not None:
        return tl.zeros((C,), tl.float32), tl.max(high, 0)
    else:
        half_low, half_high = tl.min(low, 0) / 2, tl.max(high, 0) / 2
        return half_low + half_high, half_high - half_low


@triton.jit
def largest_scale(row_scale, rows, N: tl.constexpr):
    """The largest of the rows' scales that are not NaN."""
    largest = tl.zeros((N,), tl.float32)
    for start in tl.range(0, rows, N, num_stages=STAGES):
        row = start + tl.arange(0, N)
        each = tl.load(row_scale + row, mask=row < rows, other=0.0)
        largest = tl.maximum(largest, tl.where(each > 0, each, 0.0))
    return tl.max(largest, 0)


@launchable
def bounds_kernel(
    zero_point, scale, bias, row_scale, column_scale, center, factor, fold, tiles, rows, columns,
    BITS: tl.constexpr, FUNCTION: tl.constexpr, LOWEST: tl.constexpr,
    T: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A program computes the scales of C columns; each loads all of the rows' scales.

    fold: 1 / the largest of the rows' scales. factor: 1 / (scale of a column times fold).
    """
    column = tl.program_id(0) * C + tl.arange(0, C)
    there = column < columns
    middle, reach = bounds(
        zero_point, scale, bias, tiles, column, there, columns, BITS, FUNCTION, LOWEST, T, C
    )
    largest, spacing = largest_scale(row_scale, rows, N), tl.div_rn(reach, 127.0)
    tl.store(column_scale + column, spacing * largest, mask=there)
    tl.store(center + column, middle, mask=there)
    tl.store(factor + column, inverse(spacing), mask=there)
    tl.store(fold, inverse(largest))


@launchable
def int8_operand_kernel(
    packed, zero_point, scale, bias, row_scale, center, factor, fold, codes,
    rows, columns, tile_rows,
    BITS: tl.constexpr, FUNCTION: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A program stores the codes of R rows of a tile and C columns, transposed."""
    tile, row, column, inside = block_of_tile(rows, columns, tile_rows, R, C)
    relative = tl.load(row_scale + row, mask=row < rows, other=0.0) * tl.load(fold)
    values = centered(
        packed, zero_point, scale, bias, center, factor, tile, row, column, columns, inside,
        BITS, FUNCTION, V,
    )  # fmt: skip
    to = codes + column[None, :].to(tl.int64) * rows + row[:, None]
    tl.store(to, low_byte(values * relative[:, None]), mask=inside)


@triton.jit
def centered(
    packed, zero_point, scale, bias, center, factor, tile, row, column, columns, inside,
    BITS: tl.constexpr, FUNCTION: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The values of a block minus the centers of its columns, times their factors."""
    there = column < columns
    numbers = unpacked_block(packed, row, column, columns, inside, BITS, V).to(tl.float32)
    offset, spacing = tile_affine(zero_point, scale, bias, tile, column, columns)
    by = tl.load(factor + column, mask=there, other=0.0)
    if FUNCTION is None:
        offset = (offset - tl.load(center + column, mask=there, other=0.0)) * by
        return numbers * (spacing * by)[None, :] + offset[None, :]
    else:
        return activated(numbers * spacing[None, :] + offset[None, :], FUNCTION) * by[None, :]


def tile_of(tile_rows: int) -> tuple[dict[str, int], int]:
    """The sizes of a program and its warps, for tiles of `tile_rows`."""
    rows = 128 if tile_rows > 64 else 64 if tile_rows > 32 else 32
    return {"R": rows, "C": 32, "V": VECTOR}, 4


def takes(copy: FewBitCopy, row_scale: Tensor, function: str | None) -> bool:
    """Whether the kernels take these arguments."""
    columns = copy.scale.shape[1]
    single = row_scale.dtype == torch.float32 and copy.scale.dtype != torch.float64
    return row_scale.shape[0] * columns > 0 and columns % GROUP == 0 and single


@kernels.register(op.int8_operand, "cuda", takes)
def int8_operand(
    copy: FewBitCopy, row_scale: Tensor, function: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    packed, zero_point, scale, bits, tile_rows, bias = copy
    rows, (tiles, columns) = row_scale.shape[0], scale.shape
    column_scale, center, factor = (row_scale.new_empty(columns) for _ in range(3))
    fold = row_scale.new_empty(1)
    codes = packed.new_empty(columns, rows, dtype=torch.int8)
    lowest = None if function is None else FUNCTIONS[function].lowest
    bounds_kernel[(cdiv(columns, BOUNDS["C"]),)](
        zero_point, scale, bias, row_scale, column_scale, center, factor, fold,
        tiles, rows, columns, BITS=bits, FUNCTION=function, LOWEST=lowest, **BOUNDS,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    sizes, warps = tile_of(tile_rows)
    int8_operand_kernel[(block_count(rows, columns, tile_rows, sizes),)](
        packed, zero_point, scale, bias, row_scale, center, factor, fold, codes,
        rows, columns, tile_rows, BITS=bits, FUNCTION=function, **sizes,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return codes, column_scale, center


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """The variants that this file launches."""
    some = [(None, 5), ("gelu", 5)]
    for function, bits in product((None, *FUNCTIONS), BITS) if every else some:
        yield from _variants(function, bits, every)


def _variants(function: str | None, bits: int, every: bool) -> Iterator[Variant]:
    lowest = None if function is None else FUNCTIONS[function].lowest
    chosen, label = {"BITS": bits, "FUNCTION": function}, f"{bits} bits {function}"
    floats = dict.fromkeys(("row_scale", "center", "factor", "fold"), "*fp32")
    shape = {"rows": "i32", "columns": "i32"}
    scales = {"": "*bf16"}
    if every and function is None:  # a copy shared with a norm has the norm's weight in its scale
        scales[" of a norm"] = "*fp32"
    for of, scale in scales.items():
        copy = {**COPY, "scale": scale, "bias": "*fp32"}
        scale_kinds = {name: kind for name, kind in copy.items() if name != "packed"}
        yield Variant(
            bounds_kernel,
            {**scale_kinds, **floats, "column_scale": "*fp32", "tiles": "i32", **shape},
            {**chosen, "LOWEST": lowest, **BOUNDS}, 4, 1, f"bounds {label}{of}", ("tiles",),
        )  # fmt: skip
        for tile_rows in (128, 64, 32) if every else (128,):
            sizes, warps = tile_of(tile_rows)
            suffix = "" if tile_rows == 128 else f" {tile_rows} rows"
            yield Variant(
                int8_operand_kernel,
                {**copy, **floats, "codes": "*i8", **shape, "tile_rows": "i32"},
                {**chosen, **sizes}, warps, 1, f"int8_operand {label}{of}{suffix}",
            )  # fmt: skip
