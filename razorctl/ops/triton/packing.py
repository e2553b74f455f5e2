"""Codes of 2 to 8 bits in packed bytes, within a kernel, in the layout of razorctl.ops.packing.

Columns must be a multiple of 64, so that each row is packed by itself. A strip is an eighth of a
row. A program that holds the same columns of all eight strips holds whole bytes of every plane.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from razorctl.ops.packing import PLANES

STRIPS = constexpr(8)


@triton.constexpr_function
def first_width(bits):
    """The bits of a code in its first plane; a second plane has the rest, if any."""
    return PLANES[bits][0]


@triton.constexpr_function
def in_byte(bits):
    """The number of codes that have bits in one byte of the first plane."""
    return 8 // PLANES[bits][0]


@triton.jit
def placed(code, i, s, BITS: tl.constexpr):
    """The bits of a code at their places in an int32 that collects bytes of both planes.

    The lowest byte belongs to the first plane. The next bytes belong to the second plane, one for
    each strip's column. The code is of strip s and is the i-th in the lowest byte.
    """
    LOW: tl.constexpr = first_width(BITS)
    HIGH: tl.constexpr = BITS - LOW
    word = (code & (2**LOW - 1)) << (i * LOW)
    if HIGH > 0:
        word |= (code >> LOW) << (8 + s % HIGH * 8 + s // HIGH * HIGH)
    return word


@triton.jit
def store_others(to, word, strip, inside, BITS: tl.constexpr):
    """Stores the bytes of the second plane; `to` points to the row's bytes in the first strip."""
    LOW: tl.constexpr = first_width(BITS)
    for i in tl.static_range(BITS - LOW):
        tl.store(to + (LOW + i) * strip, (word >> 8 * (i + 1)).to(tl.uint8), mask=inside)


@triton.jit
def _plane(
    packed, width, begin, row, column, columns, inside, WIDTH: tl.constexpr, V: tl.constexpr
):
    """The WIDTH bits of codes in a plane, which starts at byte `begin` of each packed row."""
    size = columns // STRIPS * WIDTH
    at = tl.multiple_of(tl.max_contiguous(column % size, V), V)
    src = packed + row[:, None] * width + begin + at[None, :]
    byte = tl.load(src, mask=inside, other=0).to(tl.int32)
    return (byte >> (column // size * WIDTH)[None, :]) & (2**WIDTH - 1)


@triton.jit
def unpacked_block(packed, row, column, columns, inside, BITS: tl.constexpr, V: tl.constexpr):
    """The codes of rows `row` [R], int64, and columns `column` [C], int32 [R, C].

    A byte is loaded once for each code in it; all loads but the first hit a cache. V: columns come
    in runs of V that start at multiples of V.
    """
    if BITS == 8:  # codes are in the order of columns
        src = packed + row[:, None] * columns + column[None, :]
        return tl.load(src, mask=inside, other=0).to(tl.int32)
    LOW: tl.constexpr = first_width(BITS)
    strip = tl.multiple_of(columns // STRIPS, 8)
    code = _plane(packed, strip * BITS, 0, row, column, columns, inside, LOW, V)
    if BITS > LOW:
        high = _plane(
            packed, strip * BITS, strip * LOW, row, column, columns, inside, BITS - LOW, V
        )
        code |= high << LOW
    return code
