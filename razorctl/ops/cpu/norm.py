"""Kernels of ops.norm; torch normalizes."""

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import norm as op
from razorctl.ops.cpu.library import DTYPES, Copy, call, pointer, takes, takes_copy
from razorctl.ops.cpu.quantize import quantize
from razorctl.ops.int8 import empty_rows


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
    """See `ops.norm.norm_quantize`."""
    y, rows, mean, found = op.normalized(x, weight, bias, eps, centers, dtype, mean, rstd)
    copy = quantize(rows, bits, tile_rows, mean, found)
    return y, found if rstd is None else found.new_empty(0), *copy


def _grad(
    dy: Tensor,
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bits: int,
    tile_rows: int,
    weight: Tensor | None,
    rstd: Tensor,
    centers: bool,
    residual: Tensor | None,
    int8: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias; fills `int8` with the int8 copy of the first."""
    rows, columns = dy.shape
    copy = Copy(packed, zero_point, scale, None, bits, rows, tile_rows)
    weight = torch.ones(columns) if weight is None else weight.float().contiguous()
    rstd = rstd.contiguous()
    dx, dw, db = torch.empty(dy.shape), torch.empty(columns), torch.empty(columns)
    added = dy if residual is None else residual  # only its address may be missing
    call(
        *("norm_grad", copy, pointer(dy), DTYPES[dy.dtype], dy.stride(0), pointer(weight)),
        *(pointer(rstd), int(centers), pointer(residual), DTYPES[added.dtype], added.stride(0)),
        *(pointer(t) for t in (dx, dw, db, *(int8 or [None] * 3))),
    )
    return dx, dw, db


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
    copy = packed, zero_point, scale, bits, tile_rows
    return _grad(dy, *copy, weight, rstd, centers, residual)


def norm_grad_int8(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `ops.norm.norm_grad_int8`."""
    copy, int8 = (packed, zero_point, scale, bits, tile_rows), empty_rows(dy)
    return *_grad(dy, *copy, weight, rstd, centers, residual, int8), *int8


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


kernels.register(op.norm_quantize, "cpu", norm_quantize, lambda x, *others: takes(x))
kernels.register(op.norm_grad, "cpu", norm_grad, takes_grad)
kernels.register(op.norm_grad_int8, "cpu", norm_grad_int8, takes_grad)
