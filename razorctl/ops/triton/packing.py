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


@triton.constexpr_function
def in_byte(bits):
    """How many codes have bits in one byte of the first plane."""
    return 8 // PLANES[bits][0]


@triton.constexpr_function
def strip_of(n, bits):
    """The strip whose code is the n-th to be packed: the codes of a byte follow each other."""
    width = PLANES[bits][0]
    each = 8 // width
    return n % each * width + n // each


@triton.jit
def pack(to, begun, code, n: tl.constexpr, strip, inside, BITS: tl.constexpr):
    """Packs the codes, uint8, of strip `strip_of(n)`; returns the bytes that are not complete.

    to: pointers to the bytes of these columns in the first strip. begun: what was returned for
    n - 1. Bytes are stored as soon as they are complete, which saves registers.
    """
    LOW: tl.constexpr = first_width(BITS)
    HIGH: tl.constexpr = BITS - LOW
    EACH: tl.constexpr = in_byte(BITS)
    S: tl.constexpr = strip_of(n, BITS)
    low = (code & (2**LOW - 1)) << (n % EACH * LOW)
    if n % EACH > 0:
        low |= begun[0]
    if n % EACH == EACH - 1:
        tl.store(to + S % LOW * strip, low, mask=inside)
    rest = begun[1:]
    if HIGH > 0:
        high = (code >> LOW) << (S // HIGH * HIGH)
        if S < HIGH:
            rest += (high,)
        else:
            rest = rest[: S % HIGH] + (rest[S % HIGH] | high,) + rest[S % HIGH + 1 :]
        if n == 7:
            for i in tl.static_range(HIGH):
                tl.store(to + (LOW + i) * strip, rest[i], mask=inside)
    return (low,) + rest


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
