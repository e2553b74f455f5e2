"""Kernel of ops.norm_again: codes of ((x_hat / rstd + mean + gamma f) - sum_mean) sum_rstd.

x_hat [rows, columns] are the values of a copy; scale, zero_point [tiles, columns].
"""

from collections.abc import Iterator
from functools import cache
from itertools import product

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from razorctl.ops import kernels, quantize
from razorctl.ops import norm_again as op
from razorctl.ops.op import FewBitCopy
from razorctl.ops.packing import BITS
from razorctl.ops.triton import copies
from razorctl.ops.triton.copies import HELD, ends, scales
from razorctl.ops.triton.launch import all_registers, cdiv, launchable
from razorctl.ops.triton.packing import unpacked_block
from razorctl.ops.triton.tiles import COPY, tile_affine
from razorctl.ops.triton.variants import Variant, dtypes

PARTS = constexpr(quantize.PARTS)
MADE = constexpr(op.BITS)
COLUMNS = 32  # that a program makes
VECTOR = 8  # columns whose bytes a thread loads at once


@launchable
def norm_again_kernel(
    packed, zero_point, scale, bias, f, gamma, mean, rstd, sum_mean, sum_rstd,
    codes, to_zero_point, to_scale, rows, columns, stride, tile_rows,
    BITS: tl.constexpr, LIMIT: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A program makes C columns of a whole tile of at most R rows."""
    blocks = tl.cdiv(columns, C)
    tile = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * C + tl.arange(0, C)
    first = tile * tile_rows
    count = tl.minimum(rows - first, tile_rows).to(tl.int32)
    local, there = tl.arange(0, R), column < columns
    row = first + tl.minimum(local, count - 1)  # rows read twice change neither end of a tile
    wide = (row < rows)[:, None] & there[None, :]
    offset, spacing = tile_affine(zero_point, scale, bias, tile, column, columns)
    numbers = unpacked_block(packed, row, column, columns, wide, BITS, V)
    values = numbers.to(tl.float32) * spacing[None, :] + offset[None, :]
    if rstd is not None:
        values *= tl.div_rn(1.0, tl.load(rstd + row))[:, None]
    if mean is not None:
        values += tl.load(mean + row)[:, None]
    src = f + row[:, None] * stride + column[None, :]
    branch = tl.load(src, mask=wide, other=0.0).to(tl.float32)
    if gamma is not None:
        branch *= tl.load(gamma + column, mask=there, other=0.0).to(tl.float32)[None, :]
    values += branch
    if sum_mean is not None:
        values -= tl.load(sum_mean + row)[:, None]
    values *= tl.load(sum_rstd + row)[:, None]
    low, high = ends(values, LIMIT)
    zero, each, factor = scales(low, high, MADE)
    at = tile * columns + column
    tl.store(to_zero_point + at, zero.to(tl.int16), mask=there)
    tl.store(to_scale + at, each, mask=there)
    code = values * factor[None, :] + (zero / PARTS + 0.5)[None, :]
    code = tl.minimum(tl.maximum(code, 0.0), 2**MADE - 0.5).to(tl.int32)
    to = codes + row[:, None] * columns + column[None, :]
    tl.store(to, code.to(tl.uint8), mask=(local < count)[:, None] & there[None, :])


def takes(
    copy: FewBitCopy,
    f: Tensor,
    gamma: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    sum_mean: Tensor | None,
    sum_rstd: Tensor,
) -> bool:
    """Whether the kernel takes these arguments."""
    single = sum_rstd.dtype == torch.float32 and copy.scale.dtype != torch.float64
    return single and copies.takes(f) and copy.tile_rows <= HELD[-1]


@cache
def _sizes(tile_rows: int) -> tuple[dict[str, int], int]:
    """The sizes of a program, and its warps: of 32 elements a thread."""
    rows = next(held for held in HELD if tile_rows <= held)
    return {"R": rows, "C": COLUMNS, "V": VECTOR}, rows * COLUMNS // 1024


@kernels.register(op.norm_again, "cuda", takes)
def norm_again(
    copy: FewBitCopy,
    f: Tensor,
    gamma: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    sum_mean: Tensor | None,
    sum_rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    packed, zero_point, scale, bits, tile_rows, bias = copy
    rows, columns = f.shape
    made = quantize.empty_copy(f, rows, columns, op.BITS, tile_rows)
    sizes, warps = _sizes(tile_rows)
    norm_again_kernel[(len(scale) * cdiv(columns, COLUMNS),)](
        packed, zero_point, scale, bias, f, gamma, mean, rstd, sum_mean, sum_rstd, *made,
        rows, columns, f.stride(0), tile_rows,
        BITS=bits, LIMIT=quantize.limit(torch.float32), **sizes,
        num_warps=warps, num_stages=1, maxnreg=all_registers(warps),
    )  # fmt: skip
    return made


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """The variants that this file launches."""
    kinds = dict.fromkeys(("gamma", "mean", "rstd", "sum_mean", "sum_rstd"), "*fp32")
    made = {"codes": "*u8", "to_zero_point": "*i16", "to_scale": "*bf16"}
    shape = dict.fromkeys(("rows", "columns", "stride", "tile_rows"), "i32")
    without: dict[str, tuple[str, ...]] = {" scaled": ("bias",)}
    if every:
        without |= {"": ("bias", "gamma"), " of a norm": ("gamma", "mean", "rstd")}
    for dtype in dtypes(capability, every):
        for bits, tile_rows in product(BITS, HELD) if every else [(5, HELD[-1])]:
            sizes, warps = _sizes(tile_rows)
            for form, missing in without.items():
                pointers = {**COPY, "bias": "*fp32", "f": f"*{dtype}", **kinds, **made}
                if "bias" not in missing:
                    pointers["scale"] = "*fp32"  # of a norm
                yield Variant(
                    norm_again_kernel,
                    {n: kind for n, kind in pointers.items() if n not in missing} | shape,
                    dict.fromkeys(missing)
                    | {"BITS": bits, "LIMIT": quantize.limit(torch.float32), **sizes},
                    warps, 1,
                    f"norm_again {bits} bits {dtype} {tile_rows} rows{form}",
                    most_registers=all_registers(warps),
                )  # fmt: skip
