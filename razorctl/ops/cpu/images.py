"""Kernels of ops.images."""

import torch
from torch import Tensor

from razorctl.ops import images as op
from razorctl.ops import kernels
from razorctl.ops.cpu.library import (
    DTYPES,
    FUNCTIONS,
    Copy,
    call,
    empty_copy,
    line_for,
    pointer,
    takes,
)
from razorctl.ops.quantize import CLIP, LARGEST

TILE_ROWS = 256  # of a tile, at most; as in tiles.h


def quantize_images(
    x: Tensor,
    bits: int,
    tile_rows: int,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.images.quantize_images`."""
    batch, channels, pixels = len(x), x.shape[1], x.shape[2:].numel()
    rows = batch * pixels
    packed, zero_point, scale = empty_copy(x, rows, channels, bits, tile_rows)
    mean, rstd = (None if t is None else t.float().contiguous() for t in (mean, rstd))
    line = line_for(packed, rows, channels, bits)
    apart = 0 if rstd is None or len(rstd) == 1 else channels
    call(
        *("quantize_images", pointer(x), DTYPES[x.dtype], batch, channels, pixels),
        *(pointer(mean), pointer(rstd), apart, tile_rows, bits, CLIP.get(bits, 0.0)),
        *(LARGEST * torch.finfo(x.dtype).max, pointer(line)),
        *(pointer(t) for t in (packed, zero_point, scale)),
    )
    return packed, zero_point, scale


def dequantize_images(
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    tile_rows: int,
    dtype: torch.dtype,
    function: str | None,
    shape: list[int],
) -> Tensor:
    """See `ops.images.dequantize_images`."""
    x = packed.new_empty(shape, dtype=dtype)
    pixels = x.shape[2:].numel()
    copy = Copy(packed, zero_point, scale, bias, bits, len(x) * pixels, tile_rows)
    call("dequantize_images", copy, FUNCTIONS[function], pixels, pointer(x), DTYPES[dtype])
    return x


def takes_quantize(
    x: Tensor,
    bits: int,
    tile_rows: int,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
) -> bool:
    """Whether `quantize_images` takes these arguments."""
    return x.is_contiguous() and tile_rows <= TILE_ROWS and takes(x)


def takes_dequantize(
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    tile_rows: int,
    dtype: torch.dtype,
    *_: object,
) -> bool:
    """Whether `dequantize_images` takes these arguments."""
    return packed.numel() > 0 and tile_rows <= TILE_ROWS and dtype in DTYPES and takes(scale)


kernels.register(op.quantize_images, "cpu", quantize_images, takes_quantize)
kernels.register(op.dequantize_images, "cpu", dequantize_images, takes_dequantize)
