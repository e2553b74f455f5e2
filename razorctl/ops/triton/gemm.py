"""GEMMs of int8 operands, both contiguous along k, whose scales are applied before the store.

out [m, n] = a_scale (a b^T) b_scale + left right^T, for a [m, k] and b [n, k].

Three ways compute the same numbers: a Triton kernel in one of the tiles of `tiles`; for a product
of few tiles, the same kernel with the terms of each tile split among several programs, which add
theirs to an int32 product, in whichever order; and `torch._int_mm` with its int32 product. The
last two are followed by the same epilogue as a kernel of its own. The fastest one is found by
timing, once for each card and size. Cards before sm_80 have the last way alone: Triton's int8
`tl.dot` does not compile for them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from razorctl.ops import gemm as op
from razorctl.ops import kernels
from razorctl.ops.gemm import cublas_gemm, part_rows
from razorctl.ops.triton import tuning
from razorctl.ops.triton.launch import capability as _capability
from razorctl.ops.triton.launch import cdiv, launchable
from razorctl.ops.triton.launch import processors as _processors
from razorctl.ops.triton.variants import DTYPES, Variant, dtypes

MOST_TERMS = 2**17 - 64  # products of int8 whose sum is sure to fit in int32; keeps alignment
CUBLAS, SPLIT = "cublas", "split"
# Of a tile split among programs: how many at most, and of how many terms each at least.
MOST_PARTS, FEWEST_TERMS = 8, 1024
BUSY = 0.8  # the share of multiprocessors that have a program, averaged over waves


@dataclass(frozen=True)
class Tile:
    """What a program of `scaled_gemm_kernel` computes: rows x columns, `depth` terms at a time.

    dots: how many times `depth` a turn of the loop takes. With one, Triton prefetches the operands
    on sm_8x, a register for each byte, and large tiles spill.
    """

    rows: int
    columns: int
    depth: int
    dots: int
    warps: int
    stages: int

    @property
    def label(self) -> str:
        """A name by which the choice of this tile is kept."""
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
_HOPPER = (Tile(128, 256, 128, 1, 8, 4), Tile(256, 128, 128, 1, 8, 4), Tile(128, 128, 128, 1, 8, 4),
           Tile(64, 128, 128, 1, 4, 4))  # fmt: skip
_BLACKWELL = (Tile(128, 256, 128, 1, 8, 3), Tile(128, 128, 128, 1, 4, 4),
              Tile(128, 128, 128, 1, 8, 4), Tile(128, 64, 128, 1, 4, 4))  # fmt: skip
_CONSUMER_BLACKWELL = (Tile(128, 256, 64, 1, 8, 4), Tile(128, 256, 128, 1, 8, 3),
                       Tile(128, 128, 128, 1, 4, 3), Tile(256, 128, 64, 1, 8, 4),
                       Tile(128, 64, 128, 1, 4, 3))  # fmt: skip


def tiles(capability: int, aligned: bool = True) -> tuple[Tile, ...]:
    """The tiles to choose from on cards of a compute capability; none before sm_80.

    aligned: whether the result has a multiple of 16 columns. Other rows are stored by elements,
    which takes the large tiles more registers than there are.
    """
    found: tuple[Tile, ...] = ()
    if capability >= 120:
        found = _CONSUMER_BLACKWELL
    elif capability >= 100:
        found = _BLACKWELL
    elif capability >= 90:
        found = _HOPPER
    elif capability >= 80:  # with 163 or 99 KiB of shared memory
        found = _AMPERE if capability in (80, 87) else _ADA
    return found if aligned else found[-1:]


@triton.jit
def _store_scaled(product, out, a_scale, b_scale, left, right, rows, columns, m, n):
    """out = a_scale product b_scale + left right^T for a tile at `rows` and `columns`."""
    in_rows, in_columns = rows < m, columns < n
    values = product.to(tl.float32) * tl.load(b_scale + columns, in_columns, 0)[None, :]
    if a_scale is not None:
        values *= tl.load(a_scale + rows, in_rows, 0)[:, None]
    if left is not None:
        across = tl.load(right + columns, in_columns, 0)[None, :]
        values += tl.load(left + rows, in_rows, 0)[:, None] * across
    at = out + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(at, values.to(out.dtype.element_ty), mask=in_rows[:, None] & in_columns[None, :])


@triton.jit
def _halves(product, BM: tl.constexpr, BN: tl.constexpr):
    """The first columns of a tile [BM, BN], and the others."""
    return product.reshape(BM, 2, BN // 2).permute(0, 2, 1).split()


@triton.jit
def _add(product, out, rows, columns, m, n):
    """Adds a tile at `rows` and `columns` to `out`, whose other programs may do so meanwhile."""
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    tl.atomic_add(out + rows[:, None] * n + columns[None, :], product, mask=inside, sem="relaxed")


@launchable
def scaled_gemm_kernel(
    a, b, a_scale, b_scale, left, right, out, m, n, k, a_stride, b_stride, terms_each,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DOTS: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of `scaled_gemm`; k must not exceed MOST_TERMS.

    terms_each: None, or of how many terms each program along the grid's second axis adds the
    products to int32 `out`, without scales.
    """
    # Programs that run at a time share rows of b: eight tiles down, then the next column.
    DOWN: tl.constexpr = 8
    band = DOWN * tl.cdiv(n, BN)
    program = tl.program_id(0)
    first = program // band * DOWN
    height = min(tl.cdiv(m, BM) - first, DOWN)
    row = (first + program % band % height) * BM
    column = program % band // height * BN

    rows, columns, terms = row + tl.arange(0, BM), column + tl.arange(0, BN), tl.arange(0, BK)
    # Rows past the end are read again from the start, so that loads need masks along k alone;
    # k, the strides and the pointers are multiples of 16.
    a_at = a + (rows % m).to(tl.int64)[:, None] * a_stride + terms[None, :]
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

    # Half of the columns at a time, in half of the registers.
    HALF: tl.constexpr = BN // 2
    near, far = _halves(product, BM, BN)
    columns = column + tl.arange(0, HALF)
    if terms_each is not None:  # each address takes two registers, so a quarter at a time
        QUARTER: tl.constexpr = BN // 4
        columns = column + tl.arange(0, QUARTER)
        first, second = _halves(near, BM, HALF)
        _add(first, out, rows, columns, m, n)
        _add(second, out, rows, columns + QUARTER, m, n)
        first, second = _halves(far, BM, HALF)
        _add(first, out, rows, columns + HALF, m, n)
        _add(second, out, rows, columns + HALF + QUARTER, m, n)
    else:
        _store_scaled(near, out, a_scale, b_scale, left, right, rows, columns, m, n)
        _store_scaled(far, out, a_scale, b_scale, left, right, rows, columns + HALF, m, n)


@launchable
def epilogue_kernel(
    product, out, a_scale, b_scale, left, right, m, n, stride,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """The scales of an int32 product [m, n] whose rows are `stride` apart."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    at = product + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    tile = tl.load(at, mask=(rows < m)[:, None] & (columns < n)[None, :], other=0)
    _store_scaled(tile, out, a_scale, b_scale, left, right, rows, columns, m, n)


EPILOGUE = {"BM": 16, "BN": 256}
EPILOGUE_WARPS, STAGES = 4, 3


def takes(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    *outer: Tensor | None,
) -> bool:
    """Whether `scaled_gemm` here can compute it: no operand is empty, nothing is float64."""
    return bool(a.numel() and b.numel()) and torch.float64 not in (dtype, b_scale.dtype)


@kernels.register(op.scaled_gemm, "cuda", takes)
def scaled_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Tensor:
    a, b = _aligned(a), _aligned(b)
    k = a.shape[1]
    if k <= MOST_TERMS:
        return _gemm(a, b, a_scale, b_scale, dtype, left, right)
    out = _gemm(a[:, :MOST_TERMS], b[:, :MOST_TERMS], a_scale, b_scale, torch.float32, left, right)
    for start in range(MOST_TERMS, k, MOST_TERMS):
        terms = slice(start, start + MOST_TERMS)
        out += _gemm(a[:, terms], b[:, terms], a_scale, b_scale, torch.float32, None, None)
    return out.to(dtype)


def _gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    left: Tensor | None,
    right: Tensor | None,
) -> Tensor:
    """`scaled_gemm` in the way that is the fastest on the device of `a`."""
    (m, k), n = a.shape, b.shape[0]  # len() of a tensor takes the host several times as long
    out = a.new_empty(m, n, dtype=dtype)
    work = (a, b, a_scale, b_scale, left, right, out)
    choices, key = _choices(_capability(a.device), _shared_by(a), m, n, k, dtype)
    tuning.fastest(choices, work, key)(*work)
    return out


@lru_cache(maxsize=1024)
def _choices(
    capability: int, processors: int, m: int, n: int, k: int, dtype: torch.dtype
) -> tuple[dict[str, Callable[..., None]], str]:
    """The ways to go, and what the fastest one depends on: sizes to two leading bits, and more."""
    aligned = n % 16 == 0
    m, n, k = _rounded(m), _rounded(n), _rounded(k)
    few = any(parts(tile, m, n, k, processors) > 1 for tile in tiles(capability, aligned)[:1])
    key = f"scaled_gemm {m}x{n}x{k} {dtype.itemsize}{'' if aligned else ' odd'}"
    return ways(capability, aligned, few), key


@cache
def ways(capability: int, aligned: bool, few: bool = False) -> dict[str, Callable[..., None]]:
    """Name -> what fills the last of its arguments with the result; see `tiles`.

    few: whether the product has too few tiles for the card. Then the first way splits the terms.
    """
    found = tiles(capability, aligned)
    return {
        **{f"{tile.label}-{SPLIT}": partial(run_split, tile) for tile in found[: int(few)]},
        **{tile.label: partial(run_tile, tile) for tile in found},
        CUBLAS: run_cublas,
    }


def _shared_by(a: Tensor) -> int:
    """How many multiprocessors share a product; 1 where its terms are too few to be split."""
    return _processors(a.device) if a.shape[1] >= 2 * FEWEST_TERMS else 1


def parts(tile: Tile, m: int, n: int, k: int, processors: int) -> int:
    """Among how many programs to split the terms of each tile of a product [m, n] of k terms.

    The fewest of which all waves together leave at most a fifth of the processors idle; else those
    that leave least. 1 where a program would have few terms, or where the product is large.
    """
    most = min(MOST_PARTS, k // FEWEST_TERMS)
    if most < 2 or m * n > op.PART:
        return 1
    programs = cdiv(m, tile.rows) * cdiv(n, tile.columns)

    def busy(number: int) -> float:
        return programs * number / (processors * cdiv(programs * number, processors))

    enough = [number for number in range(1, most + 1) if busy(number) >= BUSY]
    return enough[0] if enough else max(range(1, most + 1), key=busy)


def _aligned(x: Tensor) -> Tensor:
    """int8 `x` [rows, k], of which 16 bytes can be read at once; terms of 0 come after its own.

    Reading byte by byte is so slow, and spills so many registers, that a copy is faster.
    """
    if x.stride(1) == 1 and not (x.shape[1] % 16 or x.stride(0) % 16 or x.storage_offset() % 16):
        return x
    return F.pad(x, (0, -x.shape[1] % 16)).contiguous()


def _rounded(size: int) -> int:
    """The next number of at most two leading bits: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    step = 1 << max(0, size.bit_length() - 2)
    return -(-size // step) * step


def run_split(
    tile: Tile,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    out: Tensor,
) -> None:
    """Fills `out` by one launch of `scaled_gemm_kernel`, for which several programs share a tile.

    The int32 product takes the memory of `out` if that is as wide.
    """
    (m, k), n = a.shape, len(b)
    turn = tile.depth * tile.dots  # of the loop
    each = cdiv(k, parts(tile, m, n, k, _shared_by(a)) * turn) * turn
    product = out.view(torch.int32) if out.itemsize == 4 else out.new_empty(m, n, dtype=torch.int32)
    product.zero_()
    grid = (cdiv(m, tile.rows) * cdiv(n, tile.columns), cdiv(k, each))
    scaled_gemm_kernel[grid](
        a, b, None, None, None, None, product, m, n, k, a.stride(0), b.stride(0), each,
        **tile.constants, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    _scale(product, a_scale, b_scale, left, right, out)


def run_tile(
    tile: Tile,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    out: Tensor,
) -> None:
    """Fills `out` by one launch of `scaled_gemm_kernel`."""
    (m, k), n = a.shape, b.shape[0]
    grid = (cdiv(m, tile.rows) * cdiv(n, tile.columns),)
    scaled_gemm_kernel[grid](
        a, b, a_scale, b_scale, left, right, out, m, n, k, a.stride(0), b.stride(0), None,
        **tile.constants, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def run_cublas(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    out: Tensor,
) -> None:
    """Fills `out` from int32 products of as many rows as `part_rows` allows."""
    m, n = out.shape
    most = part_rows(n)
    for start in range(0, m, most):
        rows = slice(start, start + most)
        some = None if a_scale is None else a_scale[rows], None if left is None else left[rows]
        _scale(cublas_gemm(a[rows], b), some[0], b_scale, some[1], right, out[rows])


def _scale(
    product: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    out: Tensor,
) -> None:
    """Fills `out` from an int32 product, which may be in the same memory."""
    m, n = out.shape
    grid = (cdiv(m, EPILOGUE["BM"]), cdiv(n, EPILOGUE["BN"]))
    epilogue_kernel[grid](
        product, out, a_scale, b_scale, left, right, m, n, product.stride(0),
        **EPILOGUE, num_warps=EPILOGUE_WARPS, num_stages=STAGES,
    )  # fmt: skip


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """What the launches above ask for; single precision takes a tile's epilogue most registers."""
    scales = dict.fromkeys(("a_scale", "b_scale", "left", "right"), "*fp32")
    sizes = dict.fromkeys(("m", "n", "k", "a_stride", "b_stride"), "i32")
    for aligned in (True, False):
        for tile in tiles(capability, aligned)[:1]:
            signature = {"a": "*i8", "b": "*i8", "out": "*i32", **sizes, "terms_each": "i32"}
            yield Variant(
                scaled_gemm_kernel, signature, dict.fromkeys(scales) | tile.constants,
                tile.warps, tile.stages,
                f"scaled_gemm {tile.label}-{SPLIT}{'' if aligned else ' odd'}",
                unaligned=("m",) if aligned else ("m", "n"),
            )  # fmt: skip
    for dtype in DTYPES if every else ("fp32",):
        signature = {"a": "*i8", "b": "*i8", **scales, "out": f"*{dtype}", **sizes}
        for aligned in (True, False):
            for tile in tiles(capability, aligned):
                yield Variant(
                    scaled_gemm_kernel, signature, {"terms_each": None, **tile.constants},
                    tile.warps, tile.stages,
                    f"scaled_gemm {tile.label} {dtype}{'' if aligned else ' odd'}",
                    unaligned=("m",) if aligned else ("m", "n"),
                )  # fmt: skip
    for dtype in dtypes(capability, every):
        signature = {"product": "*i32", "out": f"*{dtype}", **scales}
        signature |= dict.fromkeys(("m", "n", "stride"), "i32")
        yield Variant(
            epilogue_kernel, signature, dict(EPILOGUE), EPILOGUE_WARPS, STAGES,
            f"scaled_gemm epilogue {dtype}", unaligned=("m", "n"),
        )  # fmt: skip
