"""Kernel of ops.batch_norm."""

import torch
from torch import Tensor

from razorctl.ops import batch_norm as op
from razorctl.ops import kernels
from razorctl.ops.cpu.images import TILE_ROWS
from razorctl.ops.cpu.library import DTYPES, Copy, call, pointer, takes


def batch_norm_grad(
    dy: Tensor,
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bits: int,
    tile_rows: int,
    weight: Tensor | None,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.batch_norm.batch_norm_grad`."""
    channels, pixels = dy.shape[1], dy.shape[2:].numel()
    copy = Copy(packed, zero_point, scale, None, bits, len(dy) * pixels, tile_rows)
    by = (rstd if weight is None else rstd * weight).float().contiguous()
    dx, dw, db = torch.empty_like(dy), torch.empty_like(rstd), torch.empty_like(rstd)
    sums = rstd.new_empty(2, len(zero_point), channels)
    call(
        *("batch_norm_grad", copy, pointer(dy), DTYPES[dy.dtype], pixels, pointer(by)),
        *(pointer(t) for t in (sums, dx, dw, db)),
    )
    return dx, dw, db


def takes_grad(
    dy: Tensor,
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bits: int,
    tile_rows: int,
    weight: Tensor | None,
    rstd: Tensor,
) -> bool:
    """Whether `batch_norm_grad` takes these arguments."""
    single = rstd.dtype == torch.float32 and rstd.is_contiguous()
    return single and dy.is_contiguous() and tile_rows <= TILE_ROWS and takes(dy, scale)


kernels.register(op.batch_norm_grad, "cpu", batch_norm_grad, takes_grad)
