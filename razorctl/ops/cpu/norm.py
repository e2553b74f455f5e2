"""Kernels of ops.norm; the forward pass is torch's."""

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import norm as op
from razorctl.ops.cpu.library import DTYPES, Copy, call, pointer, takes_copy


def norm_grad(
    dy: Tensor,
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bits: int,
    tile_rows: int,
    weight: Tensor | None,
    rstd: Tensor,
    centers: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.norm.norm_grad`."""
    rows, columns = dy.shape
    copy = Copy(packed, zero_point, scale, None, bits, rows, tile_rows)
    weight = torch.ones(columns) if weight is None else weight.float().contiguous()
    rstd = rstd.contiguous()
    dx, dw, db = torch.empty(dy.shape), torch.empty(columns), torch.empty(columns)
    added = dy if residual is None else residual  # only its address may be missing
    call(
        *("norm_grad", copy, pointer(dy), DTYPES[dy.dtype], dy.stride(0), pointer(weight)),
        *(pointer(rstd), int(centers), pointer(residual), DTYPES[added.dtype], added.stride(0)),
        *(pointer(dx), pointer(dw), pointer(db)),
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
    centers: bool,
    residual: Tensor | None = None,
) -> bool:
    """Whether `norm_grad` takes these arguments."""
    return rstd.dtype == torch.float32 and takes_copy(dy.shape[1], dy, scale, residual)


kernels.register(op.norm_grad, "cpu", norm_grad, takes_grad)
