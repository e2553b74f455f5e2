"""Kernels that make few-bit copies, for ops.quantize and for the ops of functions and norms.

code = round(x / scale + zero_point / 8) of x [rows, columns]; scale, zero_point [tiles, columns].
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from razorctl.ops import quantize as op
from razorctl.ops.packing import GROUP
from razorctl.ops.triton.launch import all_registers, cdiv, launchable
from razorctl.ops.triton.numbers import activated, as_bfloat16, inverse, nearest, uniform
from razorctl.ops.triton.packing import STRIPS, first_width, in_byte, placed, store_others
from razorctl.ops.triton.tiles import COPY, SHAPE
from razorctl.ops.triton.variants import DTYPES, KNOWN, Variant

PARTS = constexpr(op.PARTS)
FURTHEST = constexpr(op.FURTHEST)
# A thread loads two columns at once: with more, more threads of a warp would share a column, and
# the ends of tiles would take more shuffles.
TWO = constexpr(2)
COLUMNS = 16  # columns of each strip that a program quantizes
BYTES_COLUMNS, BYTES_WARPS = 32, 2  # of a program for codes of 8 bits
HELD = (64, 128, 256)  # rows of a tile that a program holds at once
ONLY_LONG = HELD[-1] + 1
# Strips of a tile that are held or being loaded.
STAGES = {torch.float32: 3, torch.float16: 4, torch.bfloat16: 4}
LONG, LONG_WARPS, LONG_STAGES = 32, 4, 5  # for longer tiles: rows that a program holds at once
OPTIONAL = ("mean", "rstd", "weight", "bias", "seed", "y")  # arguments of the kernels
REGISTERS = 128  # of a thread, so that 16 warps fit a multiprocessor


@triton.jit
def limited(x, LIMIT: tl.constexpr):
    """`x` within the limit, and 0 for NaN."""
    return tl.minimum(tl.maximum(tl.where(x == x, x, 0.0), -LIMIT), LIMIT)


@triton.jit
def _wider(low, high, other_low, other_high):
    return tl.minimum(low, other_low), tl.maximum(high, other_high)


@triton.jit
def ends(values, LIMIT: tl.constexpr):
    """The least and the largest value of each column, limited, by one reduction."""
    low, high = tl.reduce((values, values), 0, _wider)
    return limited(low, LIMIT), limited(high, LIMIT)


@triton.jit
def _clipped(low, high, mean, variance, CLIP: tl.constexpr):
    """The ends, limited to CLIP standard deviations from the mean."""
    reach = CLIP * tl.sqrt_rn(variance)
    least, most = mean - reach, mean + reach
    low = tl.where(tl.abs(least) < float("inf"), tl.maximum(low, least), low)
    return low, tl.where(tl.abs(most) < float("inf"), tl.minimum(high, most), high)


@triton.jit
def scales(low, high, BITS: tl.constexpr):
    """The zero point as a float, the scale in bfloat16 and 1 / scale, from the ends of tiles."""
    LEVELS: tl.constexpr = 2**BITS - 1
    scale = tl.maximum(high / LEVELS - low / LEVELS, tl.maximum(high, -low) / FURTHEST)
    scale = as_bfloat16(scale * (1 + 2**-8))
    factor = inverse(scale)
    return nearest(-low * factor * PARTS), scale.to(tl.bfloat16), factor


@triton.jit
def _values(x, first, row, column, wide, stride, mean, rstd):
    """Some columns of rows `first` + `row`, normalized if there are statistics."""
    src = x + first * stride + (row[:, None] * stride + column[None, :])
    values = tl.load(src, mask=wide[None, :], other=0.0).to(tl.float32)
    if mean is not None:
        values -= mean[:, None]
    if rstd is not None:
        values *= rstd[:, None]
    return values


@triton.jit
def _part(x, first, row, column, wide, stride, mean, rstd):
    """`_values` for pointers to the statistics."""
    centers, factors = mean, rstd  # None stays None
    if mean is not None:
        centers = tl.load(mean + first + row)
    if rstd is not None:
        factors = tl.load(rstd + first + row)
    return _values(x, first, row, column, wide, stride, centers, factors)


@triton.jit
def _store_output(y, at, inside, values, weight, bias, column, wide, FUNCTION: tl.constexpr):
    """Stores f(values), or values times weight plus bias."""
    if FUNCTION is not None:
        values = activated(values, FUNCTION)
    if weight is not None:
        values *= tl.load(weight + column, mask=wide, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        values += tl.load(bias + column, mask=wide, other=0.0).to(tl.float32)[None, :]
    tl.store(y + at, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def code_of(values, zero, factor, seed, position, BITS: tl.constexpr):
    """The codes: truncation rounds to nearest after adding 1/2, else at random."""
    if seed is None:
        code = values * factor[None, :] + (zero / PARTS + 0.5)[None, :]
    else:
        code = values * factor[None, :] + (zero / PARTS)[None, :] + uniform(seed, position)
    return tl.minimum(tl.maximum(code, 0.0), 2**BITS - 0.5).to(tl.int32)


@launchable
def quantize_tile(
    x, mean, rstd, weight, bias, seed, y, packed, zero_point, scale,
    rows, columns, stride, tile_rows,
    BITS: tl.constexpr, CLIP: tl.constexpr, LIMIT: tl.constexpr, FUNCTION: tl.constexpr,
    R: tl.constexpr, U: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program copies U columns of each strip of a whole tile of at most R rows.

    It holds one strip; the next STAGES - 1 are being loaded, where a card can copy into shared
    memory meanwhile. y: None, or where to store f(x), or x_hat weight + bias for the normalized
    x_hat. CLIP: standard deviations to which codes are limited on either side of the mean, or None.
    """
    strip = tl.multiple_of(columns // 8, 8)
    blocks = tl.cdiv(strip, U)
    tile = (tl.program_id(0) // blocks).to(tl.int64)
    u = tl.max_contiguous(tl.program_id(0) % blocks * U + tl.arange(0, U), TWO)
    first = tile * tile_rows
    count = tl.minimum(rows - first, tile_rows).to(tl.int32)
    local, wide = tl.arange(0, R), u < strip
    inside = (local < count)[:, None] & wide[None, :]
    row = tl.minimum(local, count - 1)  # rows read twice change neither end of a tile
    to = packed + first * (strip * BITS) + (local[:, None] * (strip * BITS) + u[None, :])
    # None stays None. Not in a helper: in Triton 3.6 none can return None.
    output, key, centers, factors = y, seed, mean, rstd
    if y is not None:
        output = y + first * columns
    if seed is not None:
        key = tl.load(seed)
    if mean is not None:
        centers = tl.load(mean + first + row)
    if rstd is not None:
        factors = tl.load(rstd + first + row)
    word = tl.zeros((R, U), tl.int32)
    # Strips whose codes share bytes are consecutive. A loop, so that Triton pipelines it: unrolled,
    # it would hold the whole tile.
    for number in tl.range(STRIPS, num_stages=STAGES):
        plane, i = number // in_byte(BITS), number % in_byte(BITS)
        s = i * first_width(BITS) + plane
        column = s * strip + u
        values = _values(x, first, row, column, wide, stride, centers, factors)
        at = local[:, None] * columns + column[None, :]
        if y is not None and FUNCTION is None:
            _store_output(output, at, inside, values, weight, bias, column, wide, FUNCTION)
        low, high = ends(values, LIMIT)
        if CLIP is not None:
            center = tl.sum(tl.where(inside, values, 0.0), 0) / count
            apart = tl.where(inside, values - center[None, :], 0.0)
            low, high = _clipped(low, high, center, tl.sum(apart * apart, 0) / count, CLIP)
        zero, spacing, factor = scales(low, high, BITS)
        tl.store(zero_point + tile * columns + column, zero.to(tl.int16), mask=wide)
        tl.store(scale + tile * columns + column, spacing, mask=wide)
        position = (first * columns).to(tl.uint32) + at.to(tl.uint32)
        code = code_of(values, zero, factor, key, position, BITS)
        word |= placed(code, i, s, BITS)
        if FUNCTION is not None:  # at this place f takes fewer registers, a norm more
            _store_output(output, at, inside, values, weight, bias, column, wide, FUNCTION)
        full = i == in_byte(BITS) - 1
        tl.store(to + plane * strip, word.to(tl.uint8), mask=inside & full)
        word &= tl.where(full, -256, -1)
    store_others(to, word, strip, inside, BITS)


@launchable
def quantize_bytes(
    x, mean, rstd, weight, bias, seed, y, packed, zero_point, scale,
    rows, columns, stride, tile_rows,
    BITS: tl.constexpr, CLIP: tl.constexpr, LIMIT: tl.constexpr, FUNCTION: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`quantize_tile` for codes of 8 bits, whole bytes: a program copies C columns of a tile."""
    blocks = tl.cdiv(columns, C)
    tile = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * C + tl.arange(0, C)
    first = tile * tile_rows
    count = tl.minimum(rows - first, tile_rows).to(tl.int32)
    local, wide = tl.arange(0, R), column < columns
    inside = (local < count)[:, None] & wide[None, :]
    row = tl.minimum(local, count - 1)  # rows read twice change neither end of a tile
    values = _part(x, first, row, column, wide, stride, mean, rstd)
    at = local[:, None] * columns + column[None, :]
    if y is not None:
        output = y + first * columns
        _store_output(output, at, inside, values, weight, bias, column, wide, FUNCTION)
    low, high = ends(values, LIMIT)
    zero, spacing, factor = scales(low, high, BITS)
    tl.store(zero_point + tile * columns + column, zero.to(tl.int16), mask=wide)
    tl.store(scale + tile * columns + column, spacing, mask=wide)
    key = seed
    if seed is not None:
        key = tl.load(seed)
    position = (first * columns).to(tl.uint32) + at.to(tl.uint32)
    code = code_of(values, zero, factor, key, position, BITS)
    tl.store(packed + first * columns + at, code.to(tl.uint8), mask=inside)


@launchable
def quantize_long_tile(
    x, mean, rstd, weight, bias, seed, y, packed, zero_point, scale,
    rows, columns, stride, tile_rows,
    BITS: tl.constexpr, CLIP: tl.constexpr, LIMIT: tl.constexpr, FUNCTION: tl.constexpr,
    R: tl.constexpr, U: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`quantize_tile` for tiles of any length: a program reads its rows again, R at a time."""
    strip = tl.multiple_of(columns // 8, 8)
    blocks = tl.cdiv(strip, U)
    tile = (tl.program_id(0) // blocks).to(tl.int64)
    u = tl.max_contiguous(tl.program_id(0) % blocks * U + tl.arange(0, U), TWO)
    begin = tile * tile_rows
    end = tl.minimum(begin + tile_rows, rows)
    local, wide, key = tl.arange(0, R), u < strip, seed
    if seed is not None:
        key = tl.load(seed)
    zeros, factors = (), ()
    for s in tl.static_range(STRIPS):
        column = s * strip + u
        low = tl.full((R, U), float("inf"), tl.float32)
        high, total = -low, tl.zeros((R, U), tl.float32)
        for first in tl.range(begin, end, R, num_stages=STAGES):
            row = tl.minimum(local, (end - 1 - first).to(tl.int32))
            values = _part(x, first, row, column, wide, stride, mean, rstd)
            low, high = tl.minimum(low, values), tl.maximum(high, values)
            if CLIP is not None:
                total += tl.where((local > row)[:, None], 0.0, values)
        low, high = limited(tl.min(low, 0), LIMIT), limited(tl.max(high, 0), LIMIT)
        if CLIP is not None:
            center, squares = tl.sum(total, 0) / (end - begin), tl.zeros((R, U), tl.float32)
            for first in tl.range(begin, end, R, num_stages=STAGES):
                row = tl.minimum(local, (end - 1 - first).to(tl.int32))
                apart = _part(x, first, row, column, wide, stride, mean, rstd) - center[None, :]
                squares += tl.where((local > row)[:, None], 0.0, apart * apart)
            low, high = _clipped(low, high, center, tl.sum(squares, 0) / (end - begin), CLIP)
        zero, spacing, factor = scales(low, high, BITS)
        tl.store(zero_point + tile * columns + column, zero.to(tl.int16), mask=wide)
        tl.store(scale + tile * columns + column, spacing, mask=wide)
        zeros += (zero,)
        factors += (factor,)
    for first in tl.range(begin, end, R, num_stages=2):  # each time all of the strips
        row = tl.minimum(local, (end - 1 - first).to(tl.int32))
        inside = (first + local < end)[:, None] & wide[None, :]
        to = packed + ((first + local) * (strip * BITS))[:, None] + u[None, :]
        word = tl.zeros((R, U), tl.int32)
        for plane in tl.static_range(first_width(BITS)):
            for i in tl.static_range(in_byte(BITS)):
                column = (i * first_width(BITS) + plane) * strip + u
                zero = zeros[i * first_width(BITS) + plane]
                factor = factors[i * first_width(BITS) + plane]
                values = _part(x, first, row, column, wide, stride, mean, rstd)
                at = ((first + local) * columns)[:, None] + column[None, :]
                position = at.to(tl.uint32)
                code = code_of(values, zero, factor, key, position, BITS)
                word |= placed(code, i, i * first_width(BITS) + plane, BITS)
                if y is not None:
                    _store_output(y, at, inside, values, weight, bias, column, wide, FUNCTION)
            tl.store(to + plane * strip, word.to(tl.uint8), mask=inside)
            word &= -256
        store_others(to, word, strip, inside, BITS)


def takes(x: Tensor, *others: Any) -> bool:
    """Whether the kernels take an activation."""
    fits = x.numel() > 0 and x.dtype in KNOWN
    return fits and x.shape[1] % GROUP == 0 and x.stride(1) == 1


@cache
def kernel_for(
    dtype: torch.dtype,
    tile_rows: int,
    bits: int,
    function: str | None,
    random: bool,
    output: bool,
) -> tuple[Any, dict[str, int], int, int]:
    """The kernel for tiles of `tile_rows`, its sizes, its warps and the most registers.

    A thread has 16 elements of a strip, or 8 where more registers are needed: by a function, random
    numbers, or the mean and the deviation of 2 bits.
    """
    if tile_rows > HELD[-1]:
        sizes = {"R": LONG, "U": COLUMNS, "STAGES": LONG_STAGES}
        return quantize_long_tile, sizes, LONG_WARPS, all_registers(LONG_WARPS)
    rows = next(held for held in HELD if tile_rows <= held)
    if bits == 8:
        single = dtype.itemsize == 2 and not (random or output)
        warps = BYTES_WARPS if single else 2 * BYTES_WARPS
        return quantize_bytes, {"R": rows, "C": BYTES_COLUMNS}, warps, all_registers(warps)
    light = function is None and not random and bits > 2
    warps = rows // (32 if light else 16)
    registers = REGISTERS if rows > HELD[0] else all_registers(warps)
    return quantize_tile, {"R": rows, "U": COLUMNS, "STAGES": STAGES[dtype]}, warps, registers


def make_copy(
    x: Tensor,
    bits: int,
    tile_rows: int,
    *,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    seed: Tensor | None = None,
    function: str | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    y: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`op.quantize`; also fills `y` [rows, columns] with f(x) or x_hat weight + bias."""
    rows, columns = x.shape
    packed, zero_point, scale = op.empty_copy(x, rows, columns, bits, tile_rows)
    kernel, sizes, warps, most = kernel_for(
        x.dtype, tile_rows, bits, function, seed is not None, y is not None
    )
    blocks = cdiv(columns // 8, sizes["U"]) if "U" in sizes else cdiv(columns, sizes["C"])
    kernel[(len(scale) * blocks,)](
        x, mean, rstd, weight, bias, seed, y, packed, zero_point, scale,
        rows, columns, x.stride(0), tile_rows,
        BITS=bits, CLIP=op.CLIP.get(bits) if seed is None else None,
        LIMIT=op.limit(x.dtype if rstd is None else torch.float32), FUNCTION=function,
        **sizes, num_warps=warps, num_stages=1, maxnreg=most,
    )  # fmt: skip
    return packed, zero_point, scale


def copy_variants(
    dtype: str,
    bits: Sequence[int],
    *,
    function: str | None = None,
    norm: bool = False,
    random: bool = False,
    every: bool = False,
    y: str | None = None,
) -> Iterator[Variant]:
    """The variants of `make_copy`.

    Args:
        dtype: The dtype of x.
        bits: Bits of codes.
        function: The function, if y is f(x).
        norm: Whether there are mean, rstd, weight and bias.
        random: Whether there is a seed.
        every: Whether to yield tiles of every length, not only the longest that is held at once.
        y: The dtype of y, None for the dtype of x.
    """
    pointers = {"x": f"*{dtype}"}
    if norm:
        pointers |= dict.fromkeys(("mean", "rstd", "weight", "bias"), "*fp32")
    if random:
        pointers["seed"] = "*i64"
    if norm or function is not None:
        pointers["y"] = f"*{y or dtype}"
    label = f"{dtype} to {y}" if y else dtype
    signature = {**pointers, **COPY, **SHAPE}
    for number in bits:
        for tile_rows in (*HELD, ONLY_LONG) if every else HELD[-1:]:
            kernel, sizes, warps, most = kernel_for(
                DTYPES[dtype], tile_rows, number, function, random, "y" in pointers
            )
            yield Variant(
                kernel, signature,
                dict.fromkeys(name for name in OPTIONAL if name not in pointers)
                | {"BITS": number, "CLIP": None if random else op.CLIP.get(number)}
                | {"LIMIT": op.limit(DTYPES[dtype]), "FUNCTION": function, **sizes}, warps, 1,
                f"{kernel.__name__} {number} bits {label} {sizes} {function} {norm=} {random=}",
                most_registers=most,
            )  # fmt: skip
