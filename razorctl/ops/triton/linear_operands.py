"""Kernels of linear_operands: the first computes all scales and bounds, the second all codes.

int8 copies of dy [rows, out], x [rows, in] and the weight [out, in], each transposed. A program of
either kernel does the work of one of `int8_operand` or `int8.int8_columns`.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import linear_operands as op
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.op import FewBitCopy
from razorctl.ops.packing import BITS as ALL_BITS
from razorctl.ops.triton import int8, int8_operand
from razorctl.ops.triton.int8 import copy_columns, leave_largest, root
from razorctl.ops.triton.int8_operand import BOUNDS, bounds, centered, largest_scale, tile_of
from razorctl.ops.triton.launch import cdiv, launchable
from razorctl.ops.triton.numbers import inverse, low_byte
from razorctl.ops.triton.tiles import COPY, block_count, block_of_tile
from razorctl.ops.triton.variants import DTYPES, Variant, dtypes

REGISTERS = 128  # of a thread: without a limit ptxas may take 80 and spill


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


@launchable
def codes_kernel(
    packed, zero_point, scale, bias, row_scale, center, workspace, x,
    dy, largest, of_dy, dy_scale, weight, of_weight, weight_scale,
    rows, terms, columns, tile_rows, outputs, stride,
    BITS: tl.constexpr, FUNCTION: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A program stores the codes of R rows and C columns of x, of dy or of the weight.

    workspace: as `scales_kernel` filled it. terms: the length of the transposed rows of x and dy.
    """
    factor, fold, partial = workspace, workspace + columns, workspace + 2 * columns
    number = tl.program_id(0)
    of_x = tl.cdiv(rows, tile_rows) * tl.cdiv(tile_rows, R) * tl.cdiv(columns, C)
    before_weight = of_x + tl.cdiv(rows, R) * tl.cdiv(outputs, C)
    if number < of_x:
        tile, row, column, inside = block_of_tile(rows, columns, tile_rows, R, C)
        values = centered(
            packed, zero_point, scale, bias, center, factor, tile, row, column, columns, inside,
            BITS, FUNCTION, V,
        )  # fmt: skip
        to = x + column[None, :].to(tl.int64) * terms + row[:, None]
        each = tl.load(row_scale + row, mask=row < rows, other=0.0)
        tl.store(to, low_byte(values * (root(each) * tl.load(fold))[:, None]), mask=inside)
    elif number < before_weight:
        copy_columns(
            number - of_x, dy, row_scale, largest, 1, of_dy, dy_scale,
            rows, outputs, outputs, terms, R, C,
        )  # fmt: skip
    if weight is not None:
        if number >= before_weight:
            copy_columns(
                number - before_weight, weight, None, partial, tl.cdiv(outputs, R), of_weight,
                weight_scale, outputs, columns, stride, outputs, R, C,
            )  # fmt: skip


def takes(
    dy: Tensor, row_scale: Tensor, _: Tensor, copy: FewBitCopy, function: Any, weight: Tensor | None
) -> bool:
    """Whether the kernels take these arguments."""
    fits = weight is None or int8.takes(weight)
    dense = dy.is_contiguous() and dy.numel() > 0
    return fits and dense and int8_operand.takes(copy, row_scale, function)


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
    sizes, warps = tile_of(tile_rows)
    height, width = sizes["R"], sizes["C"]
    terms = op.terms(rows)
    of_dy, x = dy.new_empty(outputs, terms), dy.new_empty(columns, terms)
    dy_scale, column_scale = row_scale.new_empty(outputs), row_scale.new_empty(columns)
    center = torch.empty_like(column_scale)
    across, down = cdiv(columns, width), 0 if weight is None else cdiv(outputs, height)
    workspace = row_scale.new_empty((2 + down) * columns)
    if weight is None:
        of_weight, weight_scale, stride = dy.new_empty(0), center.new_empty(0), 0
    else:
        of_weight, weight_scale = dy.new_empty(columns, outputs), center.new_empty(columns)
        stride = weight.stride(0)
    lowest = None if function is None else FUNCTIONS[function].lowest
    both = cdiv(rows, height) * cdiv(outputs, width) + down * across
    scales_kernel[(across + down * across,)](
        zero_point, scale, bias, row_scale, column_scale, center, workspace, weight,
        tiles, rows, columns, outputs, stride, BITS=bits, FUNCTION=function, LOWEST=lowest,
        T=BOUNDS["T"], N=BOUNDS["N"], R=height, C=width, num_warps=warps, num_stages=1,
        maxnreg=REGISTERS,
    )  # fmt: skip
    codes_kernel[(block_count(rows, columns, tile_rows, sizes) + both,)](
        packed, zero_point, scale, bias, row_scale, center, workspace, x,
        dy, largest, of_dy, dy_scale, weight, of_weight, weight_scale,
        rows, terms, columns, tile_rows, outputs, stride, BITS=bits, FUNCTION=function, **sizes,
        num_warps=warps, num_stages=1, maxnreg=REGISTERS,
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
    sizes_of = dict.fromkeys(("rows", "columns", "outputs", "stride"), "i32")
    lengths = {"terms": "i32", "tile_rows": "i32"}
    scales = ("bf16", "fp32") if every and function is None else ("bf16",)
    for scale in scales:  # a copy that a norm shares has its weight in the scale
        copy = {**COPY, "scale": f"*{scale}", "bias": "*fp32"}
        scale_kinds = {name: kind for name, kind in copy.items() if name != "packed"}
        of_codes = dict.fromkeys(("x", "dy", "of_dy", "of_weight"), "*i8")
        for tile_rows in (128, 64, 32) if every else (128,):
            sizes, warps = tile_of(tile_rows)
            label = f"{bits} bits {function} {dtype} {scale} {sizes['R']} rows"
            shape = {"R": sizes["R"], "C": sizes["C"], "T": BOUNDS["T"], "N": BOUNDS["N"]}
            yield Variant(
                scales_kernel,
                {**scale_kinds, **floats, "column_scale": "*fp32", "tiles": "i32"}
                | sizes_of,
                {**chosen, "LOWEST": lowest, **shape}, warps, 1, f"scales {label}", ("tiles",),
                REGISTERS,
            )  # fmt: skip
            yield Variant(
                codes_kernel,
                {**copy, **floats, **of_codes, **dict.fromkeys(of_columns, "*fp32")}
                | {**sizes_of, **lengths},
                {**chosen, **sizes}, warps, 1, f"codes {label}", most_registers=REGISTERS,
            )  # fmt: skip
