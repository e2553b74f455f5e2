"""Kernels of ops.gemm: each program computes a tile of an int8 product, or scales one.

out [m, n] = a_scale (a b^T) b_scale + left right^T, for a [m, k] and b [n, k], contiguous along k.
Instead of the values, out may be the codes of an 8-bit copy of them, uint8. A column of its tiles
is a column of the product's tiles; zero_point and scale [tiles, n] are then the copy's, else None.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl

from razorctl.ops.gemm import COPY_ROWS
from razorctl.ops.quantize import limit
from razorctl.ops.triton.copies import code_of, ends, scales
from razorctl.ops.triton.launch import launchable
from razorctl.ops.triton.variants import DTYPES, Variant, dtypes


@dataclass(frozen=True)
class Tile:
    """A tile of a program of `scaled_gemm_kernel`: rows x columns, `depth` terms at a time.

    dots: products of `depth` terms in an iteration of the loop. With one product, Triton prefetches
    the operands on sm_8x, a register for each byte, and large tiles spill.
    """

    rows: int
    columns: int
    depth: int
    dots: int
    warps: int
    stages: int

    @property
    def label(self) -> str:
        """The name of the tile on disk."""
        return f"{self.rows}x{self.columns}x{self.depth}x{self.dots}-{self.warps}w-{self.stages}s"

    @property
    def constants(self) -> dict[str, int]:
        """The constants of the kernel."""
        return {"BM": self.rows, "BN": self.columns, "BK": self.depth, "DOTS": self.dots}


# All fit a card's shared memory without a spill: tests/ops/triton/test_compiled.py.
_AMPERE = (Tile(128, 256, 64, 2, 8, 4), Tile(256, 128, 64, 2, 8, 3), Tile(128, 128, 64, 2, 4, 4),
           Tile(128, 64, 64, 2, 4, 4), Tile(64, 64, 64, 2, 4, 4))  # fmt: skip
_ADA = (Tile(128, 256, 64, 2, 8, 3), Tile(256, 128, 64, 2, 8, 3), Tile(128, 128, 64, 2, 4, 3),
        Tile(128, 256, 32, 2, 8, 4), Tile(64, 64, 64, 2, 4, 3))  # fmt: skip
_HOPPER = (Tile(128, 256, 128, 1, 8, 4), Tile(256, 128, 128, 1, 8, 4), Tile(128, 128, 128, 1, 4, 3),
           Tile(128, 128, 128, 1, 8, 4), Tile(64, 128, 128, 1, 4, 4))  # fmt: skip
_BLACKWELL = (Tile(128, 256, 128, 1, 8, 3), Tile(128, 128, 128, 1, 4, 4),
              Tile(128, 128, 128, 1, 8, 4), Tile(128, 64, 128, 1, 4, 4))  # fmt: skip
_CONSUMER_BLACKWELL = (Tile(128, 256, 64, 1, 8, 4), Tile(128, 256, 128, 1, 8, 3),
                       Tile(128, 128, 128, 1, 4, 3), Tile(256, 128, 64, 1, 8, 4),
                       Tile(128, 64, 128, 1, 4, 3))  # fmt: skip


def tiles_for(capability: int, aligned: bool = True, copied: bool = False) -> tuple[Tile, ...]:
    """The tiles to choose from on cards of a compute capability; none before sm_80.

    aligned: whether the result has a multiple of 16 columns. Other rows are stored element by
    element, for which large tiles have too few registers. copied: whether the result is a copy,
    which needs tiles of COPY_ROWS rows.
    """
    sizes: tuple[Tile, ...] = ()
    if capability >= 120:
        sizes = _CONSUMER_BLACKWELL
    elif capability >= 100:
        sizes = _BLACKWELL
    elif capability >= 90:
        sizes = _HOPPER
    elif capability >= 80:  # with 163 or 99 KiB of shared memory
        sizes = _AMPERE if capability in (80, 87) else _ADA
    if copied:
        return tuple(tile for tile in sizes if tile.rows == COPY_ROWS)
    return sizes if aligned else sizes[-1:]


@triton.jit
def _store(
    product, out, zero_point, scale, a_scale, b_scale, left, right, tile, rows, columns, m, n,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """out = a_scale product b_scale + left right^T, or a copy of it, for a block of a tile.

    tile: the number of the tile. LIMIT: see `copies.limited`.
    """
    there, row = columns < n, tl.minimum(rows, m - 1)
    values = product.to(tl.float32) * tl.load(b_scale + columns, there, 0)[None, :]
    if a_scale is not None:
        values *= tl.load(a_scale + row)[:, None]
    if left is not None:
        values += tl.load(left + row)[:, None] * tl.load(right + columns, there, 0)[None, :]
    at = out + rows.to(tl.int64)[:, None] * n + columns[None, :]
    inside = (rows < m)[:, None] & there[None, :]
    if zero_point is None:
        tl.store(at, values.to(out.dtype.element_ty), mask=inside)
    else:  # rows past the end are the last one again, which changes neither end of a column
        low, high = ends(values, LIMIT)
        zero, spacing, factor = scales(low, high, 8)
        of_tile = tile.to(tl.int64) * n + columns
        tl.store(zero_point + of_tile, zero.to(tl.int16), mask=there)
        tl.store(scale + of_tile, spacing, mask=there)
        tl.store(at, code_of(values, zero, factor, None, None, 8).to(tl.uint8), mask=inside)


@triton.jit
def _store_halves(
    product, out, zero_point, scale, a_scale, b_scale, left, right, tile, rows, column, m, n,
    LIMIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`_store` of a block [BM, BN] from `column` on, half of the columns after the other."""
    near, far = _halves(product, BM, BN)
    columns = column + tl.arange(0, BN // 2)
    _store(
        near, out, zero_point, scale, a_scale, b_scale, left, right, tile, rows, columns, m, n,
        LIMIT,
    )  # fmt: skip
    _store(
        far, out, zero_point, scale, a_scale, b_scale, left, right, tile, rows, columns + BN // 2,
        m, n, LIMIT,
    )  # fmt: skip


@triton.jit
def _halves(product, BM: tl.constexpr, BN: tl.constexpr):
    """The first columns of a tile [BM, BN], and the others."""
    return product.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()


@triton.jit
def _add(product, out, rows, columns, m, n):
    """Adds a tile at `rows` and `columns` to `out`, as other programs may at the same time."""
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    tl.atomic_add(out + rows[:, None] * n + columns[None, :], product, mask=inside, sem="relaxed")


@triton.jit
def _add_halves(product, out, rows, column, m, n, BM: tl.constexpr, BN: tl.constexpr):
    """`_add` of a block [BM, BN] from `column` on, half of the columns after the other."""
    near, far = _halves(product, BM, BN)
    columns = column + tl.arange(0, BN // 2)
    _add(near, out, rows, columns, m, n)
    _add(far, out, rows, columns + BN // 2, m, n)


@launchable
def scaled_gemm_kernel(
    a, b, a_scale, b_scale, left, right, out, zero_point, scale,
    m, n, k, a_stride, b_stride, terms_each,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DOTS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of `scaled_gemm`, or of a copy; k must not exceed MOST_TERMS.

    terms_each: None, or the number of terms that each program along the grid's second axis
    multiplies and adds to int32 `out`, without scales.
    """
    # Concurrent programs share rows of b: eight tiles down, then the next column.
    DOWN: tl.constexpr = 8
    band = DOWN * tl.cdiv(n, BN)
    program = tl.program_id(0)
    first = program // band * DOWN
    height = min(tl.cdiv(m, BM) - first, DOWN)
    row = (first + program % band % height) * BM
    column = program % band // height * BN

    rows, columns, terms = row + tl.arange(0, BM), column + tl.arange(0, BN), tl.arange(0, BK)
    # Rows past the end repeat the last one, or wrap around to the start, so that loads need
    # masks along k only; k, the strides and the pointers are multiples of 16.
    a_at = a + tl.minimum(rows, m - 1).to(tl.int64)[:, None] * a_stride + terms[None, :]
    b_at = b + (columns % n).to(tl.int64)[None, :] * b_stride + terms[:, None]
    if terms_each is not None:
        before = tl.program_id(1) * terms_each
        a_at += before
        b_at += before
        k = min(k - before, terms_each)
    product = tl.zeros((BM, BN), tl.int32)
    for start in range(0, k, BK * DOTS):
        for dot in tl.static_range(DOTS):
            rest = k - start - dot * BK
            a_part = tl.load(a_at + dot * BK, mask=terms[None, :] < rest, other=0)
            b_part = tl.load(b_at + dot * BK, mask=terms[:, None] < rest, other=0)
            product = tl.dot(a_part, b_part, product, out_dtype=tl.int32)
        a_at += BK * DOTS
        b_at += BK * DOTS

    # Half of the columns at a time takes half of the registers. A quarter, where an address takes
    # two registers, or where each of many columns has its ends.
    HALF: tl.constexpr = BN // 2
    if terms_each is None and (zero_point is None or BN <= 128):
        _store_halves(
            product, out, zero_point, scale, a_scale, b_scale, left, right, row // BM, rows,
            column, m, n, LIMIT, BM, BN,
        )  # fmt: skip
    else:
        near, far = _halves(product, BM, BN)
        if terms_each is None:
            tile = row // BM
            _store_halves(
                near, out, zero_point, scale, a_scale, b_scale, left, right, tile, rows, column,
                m, n, LIMIT, BM, HALF,
            )  # fmt: skip
            _store_halves(
                far, out, zero_point, scale, a_scale, b_scale, left, right, tile, rows,
                column + HALF, m, n, LIMIT, BM, HALF,
            )  # fmt: skip
        else:
            _add_halves(near, out, rows, column, m, n, BM, HALF)
            _add_halves(far, out, rows, column + HALF, m, n, BM, HALF)


@launchable
def epilogue_kernel(
    product, out, zero_point, scale, a_scale, b_scale, left, right, m, n, stride,
    BM: tl.constexpr, BN: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """A program scales a block of an int32 product [m, n] whose rows are `stride` apart."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    at = product + tl.minimum(rows, m - 1).to(tl.int64)[:, None] * stride + columns[None, :]
    block = tl.load(at, mask=(columns < n)[None, :], other=0)
    _store(
        block, out, zero_point, scale, a_scale, b_scale, left, right, tl.program_id(0), rows,
        columns, m, n, LIMIT,
    )  # fmt: skip


EPILOGUE, EPILOGUE_WARPS, STAGES = {"BM": 16, "BN": 256}, 4, 3
COPYING = {"BM": COPY_ROWS, "BN": 32}  # of an epilogue that makes a copy


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """The variants that `gemm` launches; single precision takes most registers of an epilogue."""
    factors = dict.fromkeys(("a_scale", "b_scale", "left", "right"), "*fp32")
    sizes = dict.fromkeys(("m", "n", "k", "a_stride", "b_stride"), "i32")
    operands = {"a": "*i8", "b": "*i8"}
    of_copy = {"out": "*u8", "zero_point": "*i16", "scale": "*bf16"}
    kinds = dtypes(capability, every)
    limits = {limit(DTYPES[kind]) for kind in kinds}
    for aligned in (True, False):
        for tile in tiles_for(capability, aligned)[:1]:
            signature = {**operands, "out": "*i32", **sizes, "terms_each": "i32"}
            yield Variant(
                scaled_gemm_kernel, signature, tile.constants, tile.warps, tile.stages,
                f"scaled_gemm {tile.label}-split{'' if aligned else ' odd'}",
                unaligned=("m",) if aligned else ("m", "n"),
            )  # fmt: skip
    for dtype in DTYPES if every else ("fp32",):
        signature = {**operands, **factors, "out": f"*{dtype}", **sizes}
        for aligned in (True, False):
            for tile in tiles_for(capability, aligned):
                yield Variant(
                    scaled_gemm_kernel, signature, tile.constants, tile.warps, tile.stages,
                    f"scaled_gemm {tile.label} {dtype}{'' if aligned else ' odd'}",
                    unaligned=("m",) if aligned else ("m", "n"),
                )  # fmt: skip
    for tile in tiles_for(capability, copied=True):
        for most in limits:
            yield Variant(
                scaled_gemm_kernel, {**operands, **factors, **of_copy, **sizes},
                {**tile.constants, "LIMIT": most}, tile.warps, tile.stages,
                f"scaled_gemm {tile.label} copy {most}", unaligned=("m",),
            )  # fmt: skip
    sizes = dict.fromkeys(("m", "n", "stride"), "i32")
    for dtype in kinds:
        yield Variant(
            epilogue_kernel, {"product": "*i32", "out": f"*{dtype}", **factors, **sizes},
            dict(EPILOGUE), EPILOGUE_WARPS, STAGES, f"scaled_gemm epilogue {dtype}",
            unaligned=("m", "n"),
        )  # fmt: skip
    for most in limits:
        yield Variant(
            epilogue_kernel, {"product": "*i32", **factors, **of_copy, **sizes},
            {**COPYING, "LIMIT": most}, EPILOGUE_WARPS, STAGES, f"scaled_gemm epilogue copy {most}",
            unaligned=("m",),
        )  # fmt: skip
