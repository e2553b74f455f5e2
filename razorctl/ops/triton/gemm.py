"""GEMMs of int8 operands, both contiguous along k, whose scales are applied before the store.

Two ways compute the same numbers: a Triton kernel in one of the tiles of `tiles`, and
`torch._int_mm` with its int32 product, followed by the same epilogue as a kernel of its own. The
faster one is found by timing, once for each card and size. Cards before sm_80 have the second way
alone: Triton's int8 `tl.dot` does not compile for them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

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
from razorctl.ops.triton.variants import DTYPES, Variant, dtypes

MOST_TERMS = 2**17 - 64  # products of int8 whose sum is sure to fit in int32; keeps alignment
CUBLAS = "cublas"


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


@launchable
def scaled_gemm_kernel(
    a, b, a_scale, b_scale, left, right, out, m, n, k, a_stride, b_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DOTS: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of `scaled_gemm`; k must not exceed MOST_TERMS."""
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
    near, far = product.reshape(BM, 2, HALF).permute(0, 2, 1).split()
    columns = column + tl.arange(0, HALF)
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


def scaled_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Tensor:
    """See `ops.gemm.scaled_gemm`."""
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
    out = a.new_empty(len(a), len(b), dtype=dtype)
    work = (a, b, a_scale, b_scale, left, right, out)
    choices = ways(_capability(a.device), len(b) % 16 == 0)
    tuning.fastest(choices, work, _bucket(a, b, dtype))(*work)
    return out


@cache
def ways(capability: int, aligned: bool) -> dict[str, Callable[..., None]]:
    """Name -> what fills the last of its arguments with the result; see `tiles`."""
    return {
        **{tile.label: partial(run_tile, tile) for tile in tiles(capability, aligned)},
        CUBLAS: run_cublas,
    }


def _aligned(x: Tensor) -> Tensor:
    """int8 `x` [rows, k], of which 16 bytes can be read at once; terms of 0 come after its own.

    Reading byte by byte is so slow, and spills so many registers, that a copy is faster.
    """
    if x.stride(1) == 1 and not (x.shape[1] % 16 or x.stride(0) % 16 or x.storage_offset() % 16):
        return x
    return F.pad(x, (0, -x.shape[1] % 16)).contiguous()


def _bucket(a: Tensor, b: Tensor, dtype: torch.dtype) -> str:
    """What the fastest way depends on: sizes to two leading bits, and the width of a result."""
    m, n, k = (_rounded(size) for size in (len(a), len(b), a.shape[1]))
    return f"scaled_gemm {m}x{n}x{k} {dtype.itemsize}{' odd' if len(b) % 16 else ''}"


def _rounded(size: int) -> int:
    """The next number of at most two leading bits: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    step = 1 << max(0, size.bit_length() - 2)
    return -(-size // step) * step


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
    (m, k), n = a.shape, len(b)
    grid = (cdiv(m, tile.rows) * cdiv(n, tile.columns),)
    scaled_gemm_kernel[grid](
        a, b, a_scale, b_scale, left, right, out, m, n, k, a.stride(0), b.stride(0),
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
        part, product = out[rows], cublas_gemm(a[rows], b)
        grid = (cdiv(len(part), EPILOGUE["BM"]), cdiv(n, EPILOGUE["BN"]))
        epilogue_kernel[grid](
            product, part, None if a_scale is None else a_scale[rows], b_scale,
            None if left is None else left[rows], right, len(part), n, product.stride(0),
            **EPILOGUE, num_warps=EPILOGUE_WARPS, num_stages=STAGES,
        )  # fmt: skip


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """What the launches above ask for; single precision takes a tile's epilogue most registers."""
    scales = dict.fromkeys(("a_scale", "b_scale", "left", "right"), "*fp32")
    sizes = dict.fromkeys(("m", "n", "k", "a_stride", "b_stride"), "i32")
    for dtype in DTYPES if every else ("fp32",):
        signature = {"a": "*i8", "b": "*i8", **scales, "out": f"*{dtype}", **sizes}
        for aligned in (True, False):
            for tile in tiles(capability, aligned):
                yield Variant(
                    scaled_gemm_kernel, signature, tile.constants, tile.warps, tile.stages,
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


kernels.register(op.scaled_gemm, "cuda", scaled_gemm, takes)
