"""Norms over the last axis: with a few-bit copy of the normalized input, and the gradient from it.

Forward, for x [rows, columns]: x_hat = (x - mean) rstd, without the mean for RMSNorm; y = x_hat
weight + bias. Backward, with g = dy weight: dx = rstd (g - mean(g) - x_hat mean(g x_hat)) +
residual, without mean(g) for RMSNorm; dweight = sum dy x_hat, dbias = sum dy over the rows.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops.int8 import empty_rows, int8_rows
from razorctl.ops.op import FewBitCopy, Fused, op
from razorctl.ops.quantize import dequantize, empty_copy, quantize

aten = torch.ops.aten


def statistics(x: Tensor, eps: float, centers: bool) -> tuple[Tensor | None, Tensor]:
    """The mean of each row of `x` (None unless `centers`) and 1 / std, [rows, 1].

    In single precision at least.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if centers:
        _, mean, rstd = torch.native_layer_norm(x, x.shape[1:], None, None, eps)
        return mean, rstd
    square = torch.linalg.vector_norm(x, dim=1, keepdim=True).square() / x.shape[1]
    return None, torch.rsqrt(square + eps)


def mean_or_none(mean: Tensor | None) -> Tensor | None:
    """The mean that `residual_add` returned; None if it is empty."""
    return None if mean is None or not mean.numel() else mean


def normalized(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centers: bool,
    dtype: torch.dtype,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The y of `norm_quantize`, and x as rows [rows, columns] with their `statistics`."""
    x = x.to(torch.promote_types(x.dtype, dtype))
    rows, shape = x.reshape(-1, x.shape[-1]), x.shape[-1:]
    if rstd is not None:
        mean = mean_or_none(mean)
        y = rows * rstd if mean is None else (rows - mean).mul_(rstd)
        y = y if weight is None else y.mul_(weight)
        y = (y if bias is None else y.add_(bias)).view(x.shape)
    elif not centers:
        y = F.rms_norm(x, shape, weight, eps)
        mean, rstd = statistics(rows, eps, centers)
    else:
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        mean, rstd = mean.view(-1, 1), rstd.view(-1, 1)
        if x.dtype.itemsize < 4:  # on some devices these statistics have 16 bits
            mean, rstd = statistics(rows, eps, centers)
    return y.to(dtype), rows, mean, rstd


def _empty_sum(x: Tensor, f: Tensor, eps: float, centers: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `residual_add`, without values."""
    y = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, f.dtype))
    rows, dtype = x.shape[:-1].numel(), torch.promote_types(y.dtype, torch.float32)
    rstd = y.new_empty(rows, 1, dtype=dtype)
    return y, torch.empty_like(rstd) if centers else rstd.new_empty(0), rstd


@op(empty=_empty_sum, fused=Fused(reduces=True))
def residual_add(x: Tensor, f: Tensor, eps: float, centers: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of two tensors, and the statistics for a norm of it.

    Returns y = x + f in the dtype that torch adds in, and the mean and 1 / std of the rows of y,
    [rows, 1], in single precision at least.

    Args:
        x: [..., columns].
        f: [..., columns].
        eps: Added to the variance.
        centers: Whether the norm subtracts the mean; if not, the mean is empty, [0].
    """
    y = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, f.dtype))
    torch.add(x, f, out=y)
    mean, rstd = statistics(y.view(-1, y.shape[-1]), eps, centers)
    return y, rstd.new_empty(0) if mean is None else mean, rstd


def _empty_normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centers: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `normalize`, without values."""
    computed = torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32)
    rstd = x.new_empty(x.shape[:-1].numel(), 1, dtype=computed)
    mean = torch.empty_like(rstd) if centers else rstd.new_empty(0)
    return x.new_empty(x.shape, dtype=dtype), mean, rstd


@op(empty=_empty_normalize, fused=Fused(reduces=True))
def normalize(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centers: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm or RMSNorm over the last axis, with the statistics of the rows.

    Returns y, of the shape of x, and the mean and 1 / std of the rows, [rows, 1], in single
    precision at least.

    Args:
        x: [..., columns].
        weight: [columns], None for 1.
        bias: [columns], None for 0.
        eps: Added to the variance.
        centers: True for LayerNorm, False for RMSNorm; then the mean is empty, [0].
        dtype: The dtype of y.
    """
    y, _, mean, rstd = normalized(x, weight, bias, eps, centers, dtype)
    return y, rstd.new_empty(0) if mean is None else mean, rstd


def _empty_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centers: bool,
    bits: int,
    tile_rows: int,
    dtype: torch.dtype,
    mean: Tensor | None,
    rstd: Tensor | None,
) -> tuple[Tensor, ...]:
    """The results of `norm_quantize`, without values."""
    rows, columns = x.shape[:-1].numel(), x.shape[-1]
    own_rstd = x.new_empty((rows, 1), dtype=torch.promote_types(x.dtype, torch.float32))
    return (
        x.new_empty(x.shape, dtype=dtype),
        own_rstd if rstd is None else own_rstd.new_empty(0),
        *empty_copy(x, rows, columns, bits, tile_rows),
    )


def _fused_norm(x: Tensor, *others: Any) -> Fused:
    """The fused kernels of `norm_quantize`: they read x twice if they compute the statistics."""
    reads = 2 if others[-1] is None else 1
    return Fused(launches=reads, again=(reads - 1) * x.nbytes, reduces=True)


@op(empty=_empty_norm, fused=_fused_norm)
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
    """LayerNorm or RMSNorm over the last axis, with a few-bit copy of x_hat.

    Returns y, of the shape of x, 1 / std [rows, 1] in single precision at least, and the copy of
    `quantize`: packed codes, zero points and scales. With `rstd`, eps and centers have no effect,
    and the 1 / std that is returned is empty, [0].

    Args:
        x: [..., columns].
        weight: [columns], None for 1.
        bias: [columns], None for 0.
        eps: Added to the variance.
        centers: True for LayerNorm, False for RMSNorm.
        bits: Bits of a code.
        tile_rows: Rows of a tile.
        dtype: The dtype of y.
        mean: The mean of x from `residual_add`, if there is one.
        rstd: The 1 / std of x from `residual_add`; None to compute both.
    """
    y, rows, mean, used_rstd = normalized(x, weight, bias, eps, centers, dtype, mean, rstd)
    copy = quantize.body(rows, bits, tile_rows, mean, used_rstd)
    return y, used_rstd if rstd is None else used_rstd.new_empty(0), *copy


def gradients(
    dy: Tensor,
    x_hat: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    centers: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias, all in the dtype of `rstd`.

    With g = dy weight: dx = rstd (g - mean(g) - x_hat mean(g x_hat)) + residual, without mean(g) if
    not `centers`; dweight = sum dy x_hat; dbias = sum dy.

    Args:
        dy: [rows, columns], the gradient of y.
        x_hat: [rows, columns].
        weight: [columns], None for 1.
        rstd: [rows, 1].
        centers: True for LayerNorm, False for RMSNorm.
        residual: [rows, columns], None for 0.
    """
    dtype = rstd.dtype
    dy, x_hat = dy.to(dtype), x_hat.to(dtype)
    weight = None if weight is None else weight.to(dtype)
    if not centers:
        g = dy if weight is None else dy * weight
        dx = torch.addcmul(g, x_hat, (g * x_hat).mean(1, keepdim=True), value=-1)
        return _plus(dx.mul_(rstd), residual), (dy * x_hat).sum(0), dy.sum(0)
    # Normalizing x_hat gives x_hat: its mean is 0, its deviation 1.
    mean = x_hat.new_zeros(len(x_hat), 1)
    weight = x_hat.new_ones(x_hat.shape[1]) if weight is None else weight
    dx, dweight, dbias = aten.native_layer_norm_backward(
        dy.contiguous(), x_hat, x_hat.shape[1:], mean, mean + 1, weight, weight, [True] * 3
    )
    return _plus(dx.mul_(rstd), residual), dweight, dbias


def _plus(dx: Tensor, residual: Tensor | None) -> Tensor:
    return dx if residual is None else dx.add_(residual)


def _empty_grads(
    dy: Tensor, copy: FewBitCopy, weight: Tensor | None, rstd: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `norm_grad`, without values."""
    sums = rstd.new_empty(dy.shape[1])
    return rstd.new_empty(dy.shape), sums, torch.empty_like(sums)


@op(empty=_empty_grads, fused=Fused(launches=2, reduces=True))
def norm_grad(
    dy: Tensor,
    copy: FewBitCopy,
    weight: Tensor | None,
    rstd: Tensor,
    centers: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gradients` with the x_hat of a copy; copy and rstd come from `norm_quantize`."""
    x_hat = dequantize.body(copy, len(dy), rstd.dtype)
    return gradients(dy, x_hat, weight, rstd, centers, residual)


def _empty_grads_int8(dy: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """The results of `norm_grad_int8`, without values."""
    dx, dweight, dbias = _empty_grads(dy, *others)
    return dx, dweight, dbias, *empty_rows(dx)


@op(empty=_empty_grads_int8, fused=Fused(launches=2, reduces=True))
def norm_grad_int8(
    dy: Tensor,
    copy: FewBitCopy,
    weight: Tensor | None,
    rstd: Tensor,
    centers: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of `norm_grad`, followed by `int8.int8_rows` of its dx."""
    dx, dweight, dbias = norm_grad.body(dy, copy, weight, rstd, centers, residual)
    return dx, dweight, dbias, *int8_rows.body(dx)
