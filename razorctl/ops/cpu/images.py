"""Kernels of ops.images."""

import torch
from torch import Tensor

from razorctl.ops import images as op
from razorctl.ops import kernels
from razorctl.ops.cpu.library import DTYPES, Copy, call, line_for, readable, single
from razorctl.ops.functions import NUMBERS
from razorctl.ops.op import FewBitCopy
from razorctl.ops.quantize import CLIP, empty_copy, limit

TILE_ROWS = 256  # rows of a tile, at most; as in tiles.h


def takes_quantize(x: Tensor, bits: int, tile_rows: int, *_: object) -> bool:
    """Whether `quantize_images` takes these arguments."""
    return x.is_contiguous() and tile_rows <= TILE_ROWS and readable(x)


@kernels.register(op.quantize_images, "cpu", takes_quantize)
def quantize_images(
    x: Tensor,
    bits: int,
    tile_rows: int,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, channels, pixels = len(x), x.shape[1], x.shape[2:].numel()
    rows = batch * pixels
    packed, zero_point, scale = empty_copy(x, rows, channels, bits, tile_rows)
    call(
        "quantize_images", x=x, dtype=DTYPES[x.dtype], batch=batch, channels=channels,
        pixels=pixels, mean=single(mean), rstd=single(rstd),
        apart=0 if rstd is None or len(rstd) == 1 else channels,
        tile_rows=tile_rows, bits=bits, reach=CLIP.get(bits, 0.0),
        limit=limit(x.dtype), line=line_for(packed, rows, channels, bits),
        packed=packed, zero_point=zero_point, scale=scale,
    )  # fmt: skip
    return packed, zero_point, scale


def takes_dequantize(copy: FewBitCopy, dtype: torch.dtype, *_: object) -> bool:
    """Whether `dequantize_images` takes these arguments."""
    fits = copy.packed.numel() > 0 and copy.tile_rows <= TILE_ROWS
    return fits and dtype in DTYPES and readable(copy.scale)


@kernels.register(op.dequantize_images, "cpu", takes_dequantize)
def dequantize_images(
    copy: FewBitCopy, dtype: torch.dtype, function: str | None, shape: list[int]
) -> Tensor:
    images = copy.packed.new_empty(shape, dtype=dtype)
    pixels = images.shape[2:].numel()
    call(
        "dequantize_images", copy=Copy(copy, len(images) * pixels), function=NUMBERS[function],
        pixels=pixels, values=images, dtype=DTYPES[dtype],
    )  # fmt: skip
    return images
