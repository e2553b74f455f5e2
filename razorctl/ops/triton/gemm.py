"""GEMMs of int8 operands, both contiguous along k, whose scales are applied before the store.

out [m, n] = a_scale (a b^T) b_scale + left right^T, for a [m, k] and b [n, k], or an 8-bit copy.

Three ways compute the same numbers: a Triton kernel with one of several tiles; for a product of few
tiles, the same kernel with the terms of each tile split among several programs, which add theirs to
an int32 product in any order; and `torch._int_mm` with its int32 product. The last two are followed
by a kernel that applies the scales. Timing finds the fastest way, once for each card and size.
Cards before sm_80 have only the last way: Triton's int8 `tl.dot` does not compile for them.
"""

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops import gemm as op
from razorctl.ops import kernels
from razorctl.ops.gemm import cublas_gemm, part_rows
from razorctl.ops.quantize import empty_copy, limit
from razorctl.ops.triton import tuning
from razorctl.ops.triton.gemm_tiles import (
    COPYING,
    EPILOGUE,
    EPILOGUE_WARPS,
    STAGES,
    Tile,
    epilogue_kernel,
    scaled_gemm_kernel,
    tiles_for,
)
from razorctl.ops.triton.launch import capability as _capability
from razorctl.ops.triton.launch import cdiv
from razorctl.ops.triton.launch import processors as _processors

MOST_TERMS = 2**17 - 64  # products of int8 whose sum is sure to fit in int32; keeps alignment
CUBLAS, SPLIT = "cublas", "split"
# Of a tile split among programs: how many at most, and of how many terms each at least.
MOST_PARTS, FEWEST_TERMS = 8, 1024
BUSY = 0.8  # the share of multiprocessors that have a program, averaged over waves


def takes(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    *outer: Tensor | None,
) -> bool:
    """Whether `scaled_gemm` here takes these: no operand is empty, nothing is float64."""
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
    """`scaled_gemm` by the fastest way on the device of `a`."""
    out = a.new_empty(a.shape[0], b.shape[0], dtype=dtype)
    _fill(a, b, a_scale, b_scale, left, right, GemmOutput(out))
    return out


def copied_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The 8-bit copy, with tiles of COPY_ROWS rows, of what `scaled_gemm` returns in a dtype.

    n must be a multiple of 16, and k at most MOST_TERMS.
    """
    m, n = a.shape[0], b.shape[0]
    packed, zero_point, scale = empty_copy(a, m, n, 8, op.COPY_ROWS)
    result = GemmOutput(packed.view(m, n), zero_point, scale, limit(dtype))
    _fill(_aligned(a), _aligned(b), a_scale, b_scale, left, right, result)
    return packed, zero_point, scale


class GemmOutput(NamedTuple):
    """Tensors that a product fills: `out` [m, n], with its values or with codes of a copy of them.

    zero_point, scale, limit: of the copy; see `ops.quantize`.
    """

    out: Tensor
    zero_point: Tensor | None = None
    scale: Tensor | None = None
    limit: float | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The arguments of kernels."""
        return self[:3]

    def of_rows(self, rows: slice) -> "GemmOutput":
        """The result for some rows, whole tiles of a copy."""
        if self.zero_point is None or self.scale is None:
            return GemmOutput(self.out[rows])
        tiles = slice(rows.start // op.COPY_ROWS, cdiv(rows.stop, op.COPY_ROWS))
        return GemmOutput(self.out[rows], self.zero_point[tiles], self.scale[tiles], self.limit)


def _fill(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    result: GemmOutput,
) -> None:
    """Fills a result by the fastest way on the device of `a`."""
    (m, k), n = a.shape, b.shape[0]  # len() of a tensor takes the host several times as long
    work = (a, b, a_scale, b_scale, left, right, result)
    form = result.out.dtype, result.scale is not None
    choices, key = _choices(_capability(a.device), _shared_by(a), m, n, k, *form)
    tuning.fastest(choices, work, key)(*work)


@lru_cache(maxsize=1024)
def _choices(
    capability: int, processors: int, m: int, n: int, k: int, dtype: torch.dtype, copied: bool
) -> tuple[dict[str, Callable[..., None]], str]:
    """The ways, and the key of the fastest one, with sizes rounded to three leading bits."""
    aligned = n % 16 == 0
    m, n, k = _rounded(m), _rounded(n), _rounded(k)
    few = any(
        programs_per_tile(tile, m, n, k, processors) > 1
        for tile in tiles_for(capability, aligned, copied)[:1]
    )
    name = "copied_gemm" if copied else "scaled_gemm"
    key = f"{name} {m}x{n}x{k} {dtype.itemsize}{'' if aligned else ' odd'}"
    return ways(capability, aligned, few, copied), key


@cache
def ways(
    capability: int, aligned: bool, few: bool = False, copied: bool = False
) -> dict[str, Callable[..., None]]:
    """Name of a way -> function that fills its last argument with the result.

    Args:
        capability: The compute capability of the card.
        aligned, copied: See `tiles_for`.
        few: Whether the product has too few tiles for the card. Then the first way splits terms.
    """
    tiles = tiles_for(capability, aligned, copied)
    return {
        **{
            f"{tile.label}-{SPLIT}": partial(run_split, tile) for tile in (tiles[:1] if few else ())
        },
        **{tile.label: partial(run_tile, tile) for tile in tiles},
        CUBLAS: run_cublas,
    }


def _shared_by(a: Tensor) -> int:
    """The multiprocessors that share a product; 1 where its terms are too few to be split."""
    return _processors(a.device) if a.shape[1] >= 2 * FEWEST_TERMS else 1


def programs_per_tile(tile: Tile, m: int, n: int, k: int, processors: int) -> int:
    """The number of programs that share the terms of each tile of a product [m, n] of k terms.

    The lowest number whose waves leave at most a fifth of the processors idle on average; if there
    is none, the number that leaves least idle. 1 where a program would have few terms, or where the
    product is large.
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
    """int8 `x` [rows, k], copied and padded with zeros unless 16 bytes can be loaded at once.

    Loading byte by byte is so slow, and spills so many registers, that a copy is faster.
    """
    if x.stride(1) == 1 and not (x.shape[1] % 16 or x.stride(0) % 16 or x.storage_offset() % 16):
        return x
    return F.pad(x, (0, -x.shape[1] % 16)).contiguous()


def _rounded(size: int) -> int:
    """The next number of at most three leading bits: 1, 2, ..., 8, 10, 12, 14, 16, 20, ..."""
    step = 1 << max(0, size.bit_length() - 3)
    return -(-size // step) * step


def run_split(
    tile: Tile,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    result: GemmOutput,
) -> None:
    """Fills `result` by a launch of `scaled_gemm_kernel` in which several programs share each tile.

    The int32 product takes the memory of the result if that is as wide.
    """
    (m, k), n, out = a.shape, len(b), result.out
    turn = tile.depth * tile.dots  # of the loop
    each = cdiv(k, programs_per_tile(tile, m, n, k, _shared_by(a)) * turn) * turn
    product = out.view(torch.int32) if out.itemsize == 4 else out.new_empty(m, n, dtype=torch.int32)
    product.zero_()
    grid = (cdiv(m, tile.rows) * cdiv(n, tile.columns), cdiv(k, each))
    scaled_gemm_kernel[grid](
        a, b, None, None, None, None, product, None, None, m, n, k, a.stride(0), b.stride(0), each,
        **tile.constants, LIMIT=None, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    _scale(product, a_scale, b_scale, left, right, result)


def run_tile(
    tile: Tile,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    result: GemmOutput,
) -> None:
    """Fills `result` by one launch of `scaled_gemm_kernel`."""
    (m, k), n = a.shape, b.shape[0]
    grid = (cdiv(m, tile.rows) * cdiv(n, tile.columns),)
    scaled_gemm_kernel[grid](
        a, b, a_scale, b_scale, left, right, *result.tensors,
        m, n, k, a.stride(0), b.stride(0), None,
        **tile.constants, LIMIT=result.limit, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def run_cublas(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    result: GemmOutput,
) -> None:
    """Fills `result` from int32 products of as many rows as `part_rows` allows."""
    m, n = result.out.shape
    most = part_rows(n, 1 if result.scale is None else op.COPY_ROWS)
    for start in range(0, m, most):
        rows = slice(start, min(start + most, m))
        some = None if a_scale is None else a_scale[rows], None if left is None else left[rows]
        _scale(cublas_gemm(a[rows], b), some[0], b_scale, some[1], right, result.of_rows(rows))


def _scale(
    product: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    result: GemmOutput,
) -> None:
    """Fills `result` from an int32 product, which may be in the same memory."""
    m, n = result.out.shape
    sizes = EPILOGUE if result.scale is None else COPYING
    epilogue_kernel[cdiv(m, sizes["BM"]), cdiv(n, sizes["BN"])](
        product, *result.tensors, a_scale, b_scale, left, right, m, n, product.stride(0),
        **sizes, LIMIT=result.limit, num_warps=EPILOGUE_WARPS, num_stages=STAGES,
    )  # fmt: skip
