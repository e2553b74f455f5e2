"""Codes of 2 to 8 bits in packed bytes, within a kernel; razorctl.ops.packing says where each is.

Columns must be a multiple of 64, so that each row is a line of its own. A strip is an eighth of a
row. A program that holds the same columns of all eight strips holds whole bytes of every plane.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from razorctl.ops.packing import PLANES

STRIPS = constexpr(8)


@triton.constexpr_function
def first_width(bits):
    """The bits of the first plane of a code; a second plane has the rest, if there are more."""
    return PLANES[bits][0]


@triton.jit
def packed_strips(codes, BITS: tl.constexpr):
    """Bytes of one column of each of a row's strips: a tuple of BITS uint8 tensors.

    codes: a tuple of 8 uint8 tensors. Byte i belongs i strips after the first in the packed row.
    """
    LOW: tl.constexpr = first_width(BITS)
    packed = ()
    for first in tl.static_range(LOW):
        byte = codes[first] & (2**LOW - 1)
        for i in tl.static_range(1, STRIPS // LOW):
            byte |= (codes[i * LOW + first] & (2**LOW - 1)) << (i * LOW)
        packed += (byte,)
    HIGH: tl.constexpr = BITS - LOW
    for first in tl.static_range(HIGH):
        byte = codes[first] >> LOW
        for i in tl.static_range(1, STRIPS // HIGH):
            byte |= (codes[i * HIGH + first] >> LOW) << (i * HIGH)
        packed += (byte,)
    return packed


@triton.jit
def _plane(
    packed, width, begin, row, column, columns, inside, WIDTH: tl.constexpr, V: tl.constexpr
):
    """The WIDTH bits of the codes in the plane that begins at a byte of the packed rows."""
    size = columns // STRIPS * WIDTH
    at = tl.multiple_of(tl.max_contiguous(column % size, V), V)
    src = packed + row[:, None] * width + begin + at[None, :]
    byte = tl.load(src, mask=inside, other=0).to(tl.int32)
    return (byte >> (column // size * WIDTH)[None, :]) & (2**WIDTH - 1)


@triton.jit
def unpacked(packed, row, column, columns, inside, BITS: tl.constexpr, V: tl.constexpr):
    """The codes of rows `row` [R], int64, and columns `column` [C], int32 [R, C].

    A byte is loaded for each code in it; all but the first of these loads hit a cache. V: so many
    columns from a multiple of V on follow each other.
    """
    LOW: tl.constexpr = first_width(BITS)
    strip = tl.multiple_of(columns // STRIPS, 8)
    code = _plane(packed, strip * BITS, 0, row, column, columns, inside, LOW, V)
    if BITS > LOW:
        high = _plane(
            packed, strip * BITS, strip * LOW, row, column, columns, inside, BITS - LOW, V
        )
        code |= high << LOW
    return code
