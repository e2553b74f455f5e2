"""Kernels of ops.norm; PyTorch normalizes."""

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import norm as op
from razorctl.ops.cpu.library import DTYPES, Copy, call, readable, readable_with_codes
from razorctl.ops.cpu.quantize import quantize
from razorctl.ops.int8 import empty_rows
from razorctl.ops.op import FewBitCopy


@kernels.register(op.norm_quantize, "cpu", lambda x, *_: readable(x))
def norm_quantize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centers: bool,
    bits: int,
    tile_rows: int,
    dtype: torch.dtype,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    y, rows, mean, used_rstd = op.normalized(x, weight, bias, eps, centers, dtype, mean, rstd)
    copy = quantize(rows, bits, tile_rows, mean, used_rstd)
    return y, used_rstd if rstd is None else used_rstd.new_empty(0), *copy


def takes_grad(
    dy: Tensor,
    copy: FewBitCopy,
    weight: Tensor | None,
    rstd: Tensor,
    centers: bool,
    residual: Tensor | None = None,
) -> bool:
    """Whether the kernels take a gradient."""
    return rstd.dtype == torch.float32 and readable_with_codes(
        dy.shape[1], dy, copy.scale, residual
    )


@kernels.register(op.norm_grad, "cpu", takes_grad)
def norm_grad(
    dy: Tensor,
    copy: FewBitCopy,
    weight: Tensor | None,
    rstd: Tensor,
    centers: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _grad(dy, copy, weight, rstd, centers, residual, 4 * (None,))


@kernels.register(op.norm_grad_int8, "cpu", takes_grad)
def norm_grad_int8(
    dy: Tensor,
    copy: FewBitCopy,
    weight: Tensor | None,
    rstd: Tensor,
    centers: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    int8 = empty_rows(dy)
    return *_grad(dy, copy, weight, rstd, centers, residual, int8), *int8


def _grad(
    dy: Tensor,
    copy: FewBitCopy,
    weight: Tensor | None,
    rstd: Tensor,
    centers: bool,
    residual: Tensor | None,
    int8: tuple[Tensor | None, ...],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias; writes the int8 copy of the first to `int8`."""
    rows, columns = dy.shape
    weight = torch.ones(columns) if weight is None else weight.float().contiguous()
    dx, dw, db = torch.empty(dy.shape), torch.empty(columns), torch.empty(columns)
    codes, scale, total, largest = int8
    call(
        "norm_grad", copy=Copy(copy, rows), dy=dy, dtype=DTYPES[dy.dtype], row_stride=dy.stride(0),
        weight=weight, rstd=rstd.contiguous(), centers=int(centers), residual=residual,
        residual_dtype=0 if residual is None else DTYPES[residual.dtype],
        residual_stride=0 if residual is None else residual.stride(0),
        dx=dx, dw=dw, db=db, codes=codes, scale=scale, total=total, largest=largest,
    )  # fmt: skip
    return dx, dw, db
