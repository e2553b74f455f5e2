"""Kernels of ops.quantize; `copies` has those that make a copy.

x = scale * (code - zero_point / 8) + bias, for codes [rows, columns] and scale, zero_point
[tiles, columns].
"""

from collections.abc import Iterator
from itertools import product

import torch
import triton.language as tl
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import quantize as op
from razorctl.ops.op import FewBitCopy
from razorctl.ops.packing import BITS, GROUP
from razorctl.ops.triton.copies import copy_variants, make_copy, takes
from razorctl.ops.triton.launch import launchable
from razorctl.ops.triton.packing import unpacked_block
from razorctl.ops.triton.tiles import COPY, SHAPE, block, block_count, block_of_tile, tile_affine
from razorctl.ops.triton.variants import DTYPES, KNOWN, Variant, dtypes


@launchable
def dequantize_kernel(
    packed, zero_point, scale, bias, y, rows, columns, tile_rows,
    BITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A program dequantizes R rows of a tile and C columns; a thread loads V columns at once."""
    tile, row, column, inside = block_of_tile(rows, columns, tile_rows, R, C)
    codes = unpacked_block(packed, row, column, columns, inside, BITS, V)
    offset, spacing = tile_affine(zero_point, scale, bias, tile, column, columns)
    values = codes.to(tl.float32) * spacing[None, :] + offset[None, :]
    at = row[:, None] * columns + column[None, :]
    tl.store(y + at, values.to(y.dtype.element_ty), mask=inside)


@kernels.register(op.quantize, "cuda", takes)
def quantize(
    x: Tensor,
    bits: int,
    tile_rows: int,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    mean = None if rstd is None else mean
    return make_copy(x, bits, tile_rows, mean=mean, rstd=rstd, seed=seed)


@kernels.register(
    op.dequantize,
    "cuda",
    lambda copy, rows, dtype: (
        copy.scale.numel() > 0 and copy.scale.shape[1] % GROUP == 0 and dtype in KNOWN
    ),
)
def dequantize(copy: FewBitCopy, rows: int, dtype: torch.dtype) -> Tensor:
    packed, zero_point, scale, bits, tile_rows, bias = copy
    columns = scale.shape[1]
    y = packed.new_empty(rows, columns, dtype=dtype)
    sizes, warps = block(dtype)
    dequantize_kernel[(block_count(rows, columns, tile_rows, sizes),)](
        packed, zero_point, scale, bias, y, rows, columns, tile_rows,
        BITS=bits, **sizes, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return y


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """The variants that this file launches."""
    for dtype in dtypes(capability, every):
        yield from copy_variants(dtype, BITS if every else (5, 2), every=every)
        yield from copy_variants(dtype, BITS if every else (5,), random=True)
        sizes, warps = block(DTYPES[dtype])
        shape = {name: kind for name, kind in SHAPE.items() if name != "stride"}
        # A copy shared with a norm has the norm's weight in its scale.
        scales = {"": "*bf16", " of a norm": "*fp32"} if every else {"": "*bf16"}
        for bits, (of, scale) in product(BITS if every else (5,), scales.items()):
            yield Variant(
                dequantize_kernel,
                {**COPY, "scale": scale, "bias": "*fp32", "y": f"*{dtype}", **shape},
                {"BITS": bits, **sizes}, warps, 1, f"dequantize {bits} bits {dtype}{of}",
            )  # fmt: skip
