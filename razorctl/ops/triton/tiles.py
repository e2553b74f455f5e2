"""Blocks of rows and columns within tiles, and the offsets and scales of their codes."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from triton.language import constexpr

from razorctl.ops import quantize as op
from razorctl.ops.triton.launch import cdiv

PARTS = constexpr(op.PARTS)
ROWS, COLUMNS, WARPS = 32, 128, 4  # of a program of an elementwise kernel
VECTOR = 16  # bytes that a thread loads at once
# Types of arguments of kernels, for `variants`.
COPY = {"packed": "*u8", "zero_point": "*i16", "scale": "*bf16"}
SHAPE = {"rows": "i32", "columns": "i32", "stride": "i32", "tile_rows": "i32"}


def chunks_of(columns: int, widest: int = 1024) -> tuple[int, int]:
    """The columns of a chunk of a row and the number of chunks, for programs of whole rows.

    At most a ninth of the lanes has no column, where one of the widths allows it.
    """
    widths = [width for width in (1024, 512, 256) if width <= widest]
    fits = (width for width in widths if 8 * cdiv(columns, width) * width <= 9 * columns)
    width = next(fits, widths[-1])
    return width, cdiv(columns, width)


def block(dtype: torch.dtype) -> tuple[dict[str, int], int]:
    """The sizes and the warps of a program of an elementwise kernel on a dtype."""
    return {"R": ROWS, "C": COLUMNS, "V": VECTOR // dtype.itemsize}, WARPS


def block_count(rows: int, columns: int, tile_rows: int, sizes: Mapping[str, int]) -> int:
    """The number of blocks of `block_of_tile`."""
    tile_blocks = cdiv(tile_rows, sizes["R"])
    return op.tile_count(rows, tile_rows) * tile_blocks * cdiv(columns, sizes["C"])


@triton.jit
def block_of_tile(rows, columns, tile_rows, R: tl.constexpr, C: tl.constexpr):
    """The tile, rows [R], int64, and columns [C] of this program, and its mask.

    A block is within one tile, so it has one scale for each column. Blocks of the same rows are
    consecutive, because they share packed bytes.
    """
    across = tl.cdiv(columns, C)
    along = tl.cdiv(tile_rows, R)
    number = tl.program_id(0) // across
    column = tl.program_id(0) % across * C + tl.arange(0, C)
    tile = (number // along).to(tl.int64)
    local = number % along * R + tl.arange(0, R)
    row = tile * tile_rows + local
    inside = ((local < tile_rows) & (row < rows))[:, None] & (column < columns)[None, :]
    return tile, row, column, inside


@triton.jit
def rows_of_tile(number, rows, tile_rows, ROWS: tl.constexpr):
    """The tile of the program of a number, and the first of its ROWS rows and the end, int64."""
    along = tl.cdiv(tile_rows, ROWS)
    tile = (number // along).to(tl.int64)
    start = number % along * ROWS
    first = tile * tile_rows + start
    return tile, first, tl.minimum(first + tl.minimum(ROWS, tile_rows - start), rows)


@triton.jit
def tile_affine(zero_point, scale, bias, tile, column, columns):
    """Offset and scale [C] of a tile's columns: a value is offset + scale * code."""
    there = column < columns
    at = tile * columns + column
    spacing = tl.load(scale + at, mask=there, other=0.0).to(tl.float32)
    offset = tl.load(zero_point + at, mask=there, other=0).to(tl.float32) * (-1 / PARTS) * spacing
    if bias is not None:
        offset += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    return offset, spacing
