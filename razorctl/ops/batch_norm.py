"""The gradients of a batch norm from a few-bit copy of its normalized input."""

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops.images import dequantize_images


@torch.library.custom_op("razorctl::batch_norm_grad", mutates_args=())
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
    """The gradients of images, weight and bias, for `dy` [batch, channels, ...].

    packed, zero_point, scale: of x_hat, as `images.quantize_images` returns them. weight, rstd:
    [channels]. The last two gradients are of the dtype of rstd.
    """
    dtype = torch.promote_types(dy.dtype, rstd.dtype)
    copy = packed, zero_point, scale, None, bits, tile_rows
    x_hat = dequantize_images._init_fn(*copy, dtype, None, list(dy.shape))
    wide, axes = dy.to(dtype), [axis for axis in range(dy.dim()) if axis != 1]
    dw, db = (wide * x_hat).sum(axes), wide.sum(axes)
    rows = dy.numel() // dy.shape[1]
    mean, slope, by = (
        t.view(-1, *[1] * (dy.dim() - 2))
        for t in (db / rows, dw / rows, rstd if weight is None else rstd * weight)
    )
    dx = x_hat.mul_(slope).neg_().add_(wide).sub_(mean).mul_(by).to(dy.dtype)
    return dx, dw.to(rstd.dtype), db.to(rstd.dtype)


@batch_norm_grad.register_fake
def _(
    dy: Tensor,
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bits: int,
    tile_rows: int,
    weight: Tensor | None,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return dy.new_empty(dy.shape), torch.empty_like(rstd), torch.empty_like(rstd)


kernels.attach(__name__)
