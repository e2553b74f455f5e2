"""Kernel of ops.norm_again."""

import torch
from torch import Tensor

from razorctl.ops import kernels, quantize
from razorctl.ops import norm_again as op
from razorctl.ops.cpu.library import DTYPES, Copy, call, readable, single
from razorctl.ops.op import FewBitCopy


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
    return sum_rstd.dtype == torch.float32 and readable(f)


@kernels.register(op.norm_again, "cpu", takes)
def norm_again(
    copy: FewBitCopy,
    f: Tensor,
    gamma: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    sum_mean: Tensor | None,
    sum_rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = f.shape
    codes, zero_point, scale = quantize.empty_copy(f, rows, columns, op.BITS, copy.tile_rows)
    call(
        "norm_again", copy=Copy(copy, rows), f=f, dtype=DTYPES[f.dtype], row_stride=f.stride(0),
        gamma=single(gamma), mean=single(mean), rstd=single(rstd), sum_mean=single(sum_mean),
        sum_rstd=single(sum_rstd), limit=quantize.limit(torch.float32),
        codes=codes, zero_point=zero_point, scale=scale,
    )  # fmt: skip
    return codes, zero_point, scale
