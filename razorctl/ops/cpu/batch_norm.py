"""Kernel of ops.batch_norm."""

import torch
from torch import Tensor

from razorctl.ops import batch_norm as op
from razorctl.ops import kernels
from razorctl.ops.cpu.images import TILE_ROWS
from razorctl.ops.cpu.library import DTYPES, Copy, call, readable
from razorctl.ops.op import FewBitCopy


def takes_grad(dy: Tensor, copy: FewBitCopy, weight: Tensor | None, rstd: Tensor) -> bool:
    """Whether the kernel takes a gradient."""
    single = rstd.dtype == torch.float32 and rstd.is_contiguous()
    fits = copy.tile_rows <= TILE_ROWS
    return single and dy.is_contiguous() and fits and readable(dy, copy.scale)


@kernels.register(op.batch_norm_grad, "cpu", takes_grad)
def batch_norm_grad(
    dy: Tensor, copy: FewBitCopy, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    channels, pixels = dy.shape[1], dy.shape[2:].numel()
    by = (rstd if weight is None else rstd * weight).float().contiguous()
    dx, dw, db = torch.empty_like(dy), torch.empty_like(rstd), torch.empty_like(rstd)
    sums = rstd.new_empty(2, len(copy.zero_point), channels)
    call(
        "batch_norm_grad", copy=Copy(copy, len(dy) * pixels), dy=dy, dtype=DTYPES[dy.dtype],
        pixels=pixels, by=by, sums=sums, dx=dx, dw=dw, db=db,
    )  # fmt: skip
    return dx, dw, db
