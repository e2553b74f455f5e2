"""The gradients of a batch norm from a few-bit copy of its normalized input.

Forward: x_hat = (x - mean) rstd of each channel, y = x_hat weight + bias, for images [batch,
channels, ...]. Backward, over the n pixels of a channel: dweight = sum dy x_hat, dbias = sum dy,
dx = rstd weight (dy - dbias / n - x_hat dweight / n).
"""

import torch
from torch import Tensor

from razorctl.ops.images import dequantize_images
from razorctl.ops.op import FewBitCopy, op


@op(
    empty=lambda dy, copy, weight, rstd: (
        dy.new_empty(dy.shape),
        torch.empty_like(rstd),
        torch.empty_like(rstd),
    )
)
def batch_norm_grad(
    dy: Tensor, copy: FewBitCopy, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of images, in the dtype of dy, and of weight and bias, in the dtype of rstd.

    Args:
        dy: [batch, channels, ...].
        copy: The copy of x_hat by `images.quantize_images`.
        weight: [channels], None for 1.
        rstd: [channels].
    """
    dtype = torch.promote_types(dy.dtype, rstd.dtype)
    x_hat = dequantize_images.body(copy, dtype, None, list(dy.shape))
    wide, axes = dy.to(dtype), [axis for axis in range(dy.dim()) if axis != 1]
    dw, db = (wide * x_hat).sum(axes), wide.sum(axes)
    rows, shape = dy.numel() // dy.shape[1], [-1] + [1] * (dy.dim() - 2)
    mean, slope = (db / rows).view(shape), (dw / rows).view(shape)
    by = (rstd if weight is None else rstd * weight).view(shape)
    dx = x_hat.mul_(slope).neg_().add_(wide).sub_(mean).mul_(by).to(dy.dtype)
    return dx, dw.to(rstd.dtype), db.to(rstd.dtype)
