"""Kernels of linear_operands: the first computes all scales and bounds, the second all codes.

int8 copies of dy [rows, out], x [rows, in] and the weight [out, in], each transposed. A program of
either kernel does the work of one of `int8_operand` or `int8.int8_columns`.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from razorctl.ops import kernels
from razorctl.ops import linear_operands as op
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.op import FewBitCopy
from razorctl.ops.packing import BITS as ALL_BITS
from razorctl.ops.triton import int8, int8_operand
from razorctl.ops.triton.int8 import LEVELS, largest_of, leave_largest, root, scale_of
from razorctl.ops.triton.int8_operand import BOUNDS, VECTOR, bounds, largest_scale
from razorctl.ops.triton.launch import cdiv, launchable
from razorctl.ops.triton.numbers import inverse, magnitude, short_activated
from razorctl.ops.triton.packing import unpacked_block
from razorctl.ops.triton.tiles import COPY, block_count, tile_affine
from razorctl.ops.triton.variants import DTYPES, Variant, dtypes

SCALED, WARPS = 32, 4  # columns and warps of a program of `scales_kernel`
REGISTERS = 128  # of a thread of it: without a limit ptxas may take 80 and spill
FLIPPED = constexpr(-0x7F7F7F80)  # 0x80808080, the signs of four bytes


@launchable
def scales_kernel(
    zero_point, scale, bias, row_scale, column_scale, center, workspace, weight,
    tiles, rows, columns, outputs, stride,
    BITS: tl.constexpr, FUNCTION: tl.constexpr, LOWEST: tl.constexpr,
    T: tl.constexpr, N: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A program computes the scales of C columns of x, or largest magnitudes of the weight.

    workspace: receives `factor` of `bounds_kernel`, [columns], 1 / the largest root of a row's
    scale in the first of the next [columns], and `partial` of `leave_largest` of the weight.
    """
    factor, fold, partial = workspace, workspace + columns, workspace + 2 * columns
    number, across = tl.program_id(0), tl.cdiv(columns, C)
    if number < across:
        column = number * C + tl.arange(0, C)
        there = column < columns
        middle, reach = bounds(
            zero_point, scale, bias, tiles, column, there, columns, BITS, FUNCTION, LOWEST, T, C
        )
        largest, spacing = largest_scale(row_scale, rows, N), tl.div_rn(reach, 127.0)
        tl.store(column_scale + column, spacing * tl.sqrt_rn(largest), mask=there)
        tl.store(center + column, middle, mask=there)
        tl.store(factor + column, inverse(spacing), mask=there)
        tl.store(fold, inverse(tl.sqrt_rn(largest)))
    if weight is not None:
        if number >= across:
            leave_largest(number - across, weight, partial, outputs, columns, stride, R, C)


@triton.jit
def _word(rows):
    """Four rows of numbers of -127 to 127, rounded to nearest, as the bytes of int32.

    A number plus 1.5 * 2 ** 23 + 128 has them, plus 128, as its last byte; sums need no masks.
    """
    a = (rows[0] + 12583040.0).to(tl.int32, bitcast=True) - 0x4B400000
    b = (rows[1] + 12583040.0).to(tl.int32, bitcast=True) - 0x4B400000
    c = (rows[2] + 12583040.0).to(tl.int32, bitcast=True) - 0x4B400000
    d = (rows[3] + 12583040.0).to(tl.int32, bitcast=True) - 0x4B400000
    return (a + (b << 8) + (c << 16) + (d << 24)) ^ FLIPPED


@triton.jit
def _words_at(codes, column, terms, row):
    """Where words of four rows from `row` on are in transposed codes [columns, terms]."""
    words = codes.to(tl.pointer_type(tl.int32))
    return words + column[None, :].to(tl.int64) * (terms // 4) + (row // 4)[:, None]


@triton.jit
def _row_of_copy(
    packed, row_scale, fold, offset, spacing, by, row, column, rows, columns, inside,
    BITS: tl.constexpr, FUNCTION: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Rows of x times their roots over the largest, and `by` of their columns."""
    values = unpacked_block(packed, row, column, columns, inside, BITS, V).to(tl.float32)
    values = values * spacing[None, :] + offset[None, :]
    each = root(tl.load(row_scale + row, mask=row < rows, other=0.0)) * fold
    if FUNCTION is None:
        return values * each[:, None]
    else:  # near 0, GELU may be off by more than it is
        values = short_activated(values, FUNCTION) * by[None, :] * each[:, None]
        return tl.minimum(tl.maximum(values, -LEVELS), LEVELS)


@triton.jit
def _row_of_matrix(x, row_scale, by, row, column, rows, stride, inside):
    """Rows of dy, which are int8 and count times their roots, or of the weight, times `by`."""
    values = tl.load(x + row[:, None] * stride + column[None, :], mask=inside, other=0)
    values = values.to(tl.float32)
    if row_scale is not None:
        values *= root(tl.load(row_scale + row, mask=row < rows, other=0.0))[:, None]
    return tl.minimum(tl.maximum(values * by[None, :], -LEVELS), LEVELS)


@triton.jit
def _store_matrix(
    number, x, row_scale, partial, blocks, codes, scale, rows, terms, columns, stride,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Stores the codes of a block; partial [blocks, columns] has magnitudes of its columns.

    blocks: None for 1.
    """
    across = tl.cdiv(columns, C)
    column = number % across * C + tl.arange(0, C)
    there = column < columns
    row = (number // across).to(tl.int64) * R + 4 * tl.arange(0, R // 4)
    if blocks is None:
        most = magnitude(tl.load(partial + column, mask=there, other=0.0))
    else:
        most = largest_of(partial, blocks, column, there, columns)
    spacing = scale_of(most)
    if number < across:
        tl.store(scale + column, spacing, mask=there)
    by = inverse(spacing)
    values = ()
    for i in tl.static_range(4):
        inside = (row + i < rows)[:, None] & there[None, :]
        values += (_row_of_matrix(x, row_scale, by, row + i, column, rows, stride, inside),)
    word = _word(values)
    padded = (row < terms)[:, None] & there[None, :]
    tl.store(_words_at(codes, column, terms, row), word, mask=padded)


@launchable
def codes_kernel(
    packed, zero_point, scale, bias, row_scale, center, workspace, x,
    dy, largest, of_dy, dy_scale, weight, of_weight, weight_scale,
    rows, terms, columns, tile_rows, outputs, stride,
    BITS: tl.constexpr, FUNCTION: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A program stores the codes of R rows and C columns of x, of dy or of the weight.

    They are transposed four rows at a time, as words. workspace: as `scales_kernel` filled it.
    terms: the length of the transposed rows of x and dy.
    """
    factor, fold, partial = workspace, workspace + columns, workspace + 2 * columns
    number = tl.program_id(0)
    of_x = tl.cdiv(rows, tile_rows) * tl.cdiv(tile_rows, R) * tl.cdiv(columns, C)
    before_weight = of_x + tl.cdiv(rows, R) * tl.cdiv(outputs, C)
    if number < of_x:
        across, along = tl.cdiv(columns, C), tl.cdiv(tile_rows, R)
        column = number % across * C + tl.arange(0, C)
        there = column < columns
        tile = (number // across // along).to(tl.int64)
        local = number // across % along * R + 4 * tl.arange(0, R // 4)
        row = tile * tile_rows + local
        inside = ((local < tile_rows) & (row < rows))[:, None] & there[None, :]
        offset, spacing = tile_affine(zero_point, scale, bias, tile, column, columns)
        by = tl.load(factor + column, mask=there, other=0.0)
        if FUNCTION is None:
            offset = (offset - tl.load(center + column, mask=there, other=0.0)) * by
            spacing *= by
        largest_root = tl.load(fold)
        values = ()
        for i in tl.static_range(4):
            values += (
                _row_of_copy(
                    packed, row_scale, largest_root, offset, spacing, by, row + i, column,
                    rows, columns, inside & (row + i < rows)[:, None], BITS, FUNCTION, V,
                ),
            )  # fmt: skip
        word = _word(values)
        tl.store(_words_at(x, column, terms, row), word, mask=inside)
    elif number < before_weight:
        _store_matrix(
            number - of_x, dy, row_scale, largest, None, of_dy, dy_scale,
            rows, terms, outputs, outputs, R, C,
        )  # fmt: skip
    if weight is not None:
        if number >= before_weight:
            _store_matrix(
                number - before_weight, weight, None, partial, tl.cdiv(outputs, R), of_weight,
                weight_scale, outputs, outputs, columns, stride, R, C,
            )  # fmt: skip


def sizes_of(tile_rows: int, function: str | None) -> tuple[dict[str, int], int]:
    """The sizes of a program of `codes_kernel` for tiles of `tile_rows`, and its warps."""
    columns = 128 if function is None else 64  # a function takes registers
    return {"R": 64 if tile_rows > 32 else 32, "C": columns, "V": VECTOR}, 4


def takes(
    dy: Tensor, row_scale: Tensor, _: Tensor, copy: FewBitCopy, function: Any, weight: Tensor | None
) -> bool:
    """Whether the kernels take these arguments."""
    fits = weight is None or (int8.takes(weight) and len(weight) % 4 == 0)
    dense = dy.is_contiguous() and dy.numel() > 0
    words = copy.tile_rows % 4 == 0 or len(copy.scale) == 1  # no word has rows of two tiles
    return fits and dense and words and int8_operand.takes(copy, row_scale, function)


@kernels.register(op.linear_operands, "cuda", takes)
def linear_operands(
    dy: Tensor,
    row_scale: Tensor,
    largest: Tensor,
    copy: FewBitCopy,
    function: str | None,
    weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    packed, zero_point, scale, bits, tile_rows, bias = copy
    (rows, outputs), (tiles, columns) = dy.shape, scale.shape
    sizes, warps = sizes_of(tile_rows, function)
    height, width = sizes["R"], sizes["C"]
    terms = op.terms(rows)
    of_dy, x = dy.new_empty(outputs, terms), dy.new_empty(columns, terms)
    dy_scale, column_scale = row_scale.new_empty(outputs), row_scale.new_empty(columns)
    center = torch.empty_like(column_scale)
    down = 0 if weight is None else cdiv(outputs, height)
    workspace = row_scale.new_empty((2 + down) * columns)
    if weight is None:
        of_weight, weight_scale, stride = dy.new_empty(0), center.new_empty(0), 0
    else:
        of_weight, weight_scale = dy.new_empty(columns, outputs), center.new_empty(columns)
        stride = weight.stride(0)
    lowest = None if function is None else FUNCTIONS[function].lowest
    others = cdiv(rows, height) * cdiv(outputs, width) + down * cdiv(columns, width)
    scales_kernel[(cdiv(columns, SCALED) * (1 + down),)](
        zero_point, scale, bias, row_scale, column_scale, center, workspace, weight,
        tiles, rows, columns, outputs, stride, BITS=bits, FUNCTION=function, LOWEST=lowest,
        T=BOUNDS["T"], N=BOUNDS["N"], R=height, C=SCALED, num_warps=WARPS, num_stages=1,
        maxnreg=REGISTERS,
    )  # fmt: skip
    codes_kernel[(block_count(rows, columns, tile_rows, sizes) + others,)](
        packed, zero_point, scale, bias, row_scale, center, workspace, x,
        dy, largest, of_dy, dy_scale, weight, of_weight, weight_scale,
        rows, terms, columns, tile_rows, outputs, stride, BITS=bits, FUNCTION=function, **sizes,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return of_dy, dy_scale, x, column_scale, center, of_weight, weight_scale


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """The variants that this file launches."""
    for function in (None, *FUNCTIONS) if every else (None, "gelu"):
        for bits in ALL_BITS if every else (5,):
            for dtype in (*dtypes(capability, every), "fp32") if not every else DTYPES:
                yield from _variants(function, bits, dtype, every)


def _variants(function: str | None, bits: int, dtype: str, every: bool) -> Iterator[Variant]:
    lowest = None if function is None else FUNCTIONS[function].lowest
    chosen = {"BITS": bits, "FUNCTION": function}
    names = "row_scale", "center", "workspace"
    of_columns = "dy_scale", "largest", "weight_scale"
    floats = dict.fromkeys(names, "*fp32") | {"weight": f"*{dtype}"}
    numbers = dict.fromkeys(("rows", "columns", "outputs", "stride"), "i32")
    lengths = {"terms": "i32", "tile_rows": "i32"}
    scales = ("bf16", "fp32") if every and function is None else ("bf16",)
    for scale in scales:  # a copy that a norm shares has its weight in the scale
        copy = {**COPY, "scale": f"*{scale}", "bias": "*fp32"}
        scale_kinds = {name: kind for name, kind in copy.items() if name != "packed"}
        of_codes = dict.fromkeys(("x", "dy", "of_dy", "of_weight"), "*i8")
        for tile_rows in (128, 64, 32) if every else (128,):
            sizes, warps = sizes_of(tile_rows, function)
            label = f"{bits} bits {function} {dtype} {scale} {sizes['R']} rows"
            shape = {"R": sizes["R"], "C": SCALED, "T": BOUNDS["T"], "N": BOUNDS["N"]}
            yield Variant(
                scales_kernel,
                {**scale_kinds, **floats, "column_scale": "*fp32", "tiles": "i32"}
                | numbers,
                {**chosen, "LOWEST": lowest, **shape}, WARPS, 1, f"scales {label}", ("tiles",),
                REGISTERS,
            )  # fmt: skip
            yield Variant(
                codes_kernel,
                {**copy, **floats, **of_codes, **dict.fromkeys(of_columns, "*fp32")}
                | {**numbers, **lengths},
                {**chosen, **sizes}, warps, 1, f"codes {label}",
            )  # fmt: skip
