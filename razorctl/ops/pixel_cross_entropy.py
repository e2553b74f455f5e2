"""Cross-entropy of upsampled logits of images; the logits never exist for a whole batch.

Logits z = upsampled x, loss = logsumexp(z) - sum t z of each pixel [batch, height, width]; and the
gradient dx [batch, classes, h, w], the upsampling's backward pass of factor (p - t).

Segmentation models compute logits of a low resolution and upsample them to the labels' size. With
p the softmax of a pixel's logits and t its target, smoothed or not, the gradient of its loss with
respect to its logits is p - t. So the pass over parts of the images that computes the losses also
computes the gradient of the low-resolution logits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from razorctl.ops.op import op

BYTES = 2**28  # of the upsampled logits of a part in single precision, unless one image is larger

upsample = torch.ops.aten.upsample_bilinear2d.default
upsample_backward = torch.ops.aten.upsample_bilinear2d_backward.default


def part_images(classes: int, size: Sequence[int]) -> int:
    """The number of images whose upsampled logits exist at the same time."""
    height, width = size
    return max(1, BYTES // (torch.float32.itemsize * max(1, classes * height * width)))


@op(
    empty=lambda x, target, *others: (
        x.new_empty(target.shape, dtype=torch.promote_types(x.dtype, torch.float32)),
        x.new_empty(x.shape if others[-1] else 0),
    )
)
def pixel_cross_entropy(
    x: Tensor,
    target: Tensor,
    align_corners: bool,
    scale_h: float | None,
    scale_w: float | None,
    ignore_index: int,
    smoothing: float,
    factor: Tensor | None,
    gradient: bool,
) -> tuple[Tensor, Tensor]:
    """The cross-entropy of each pixel of bilinearly upsampled logits, and their gradient.

    Returns the losses [batch, height, width], in single precision at least, and the gradient of the
    sum of factor * loss with respect to x, in its dtype.

    Args:
        x: Logits [batch, classes, h, w].
        target: Classes, int64 [batch, height, width], of the size that x is upsampled to.
        align_corners: As of aten::upsample_bilinear2d.
        scale_h: As of aten::upsample_bilinear2d.
        scale_w: As of aten::upsample_bilinear2d.
        ignore_index: A pixel with this target has loss 0 and no gradient.
        smoothing: As `label_smoothing` of `F.cross_entropy`.
        factor: [batch, height, width], None for 1.
        gradient: Whether the gradient is wanted; if not, it is empty, [0].
    """
    dtype, classes = torch.promote_types(x.dtype, torch.float32), x.shape[1]
    size, scales = target.shape[1:], (scale_h, scale_w)
    losses = x.new_empty(target.shape, dtype=dtype)
    dx = x.new_empty(x.shape if gradient else 0)
    images = part_images(classes, size)
    for start in range(0, len(x), images):
        part = slice(start, start + images)
        logits = upsample(x[part].to(dtype), size, align_corners, *scales)
        logits -= logits.amax(1, keepdim=True)
        taken = target[part] != ignore_index
        index = torch.where(taken, target[part], 0).unsqueeze(1)
        loss = logits.gather(1, index).squeeze(1).mul_(smoothing - 1)
        if smoothing:
            loss -= smoothing * logits.mean(1)
        total = logits.exp_().sum(1)
        losses[part] = torch.where(taken, loss.add_(total.log()), 0)
        del loss
        if not gradient:
            continue
        factors = taken.to(dtype)
        if factor is not None:
            factors = factors * factor[part]
        logits.mul_(total.reciprocal_().mul_(factors).unsqueeze(1))
        factors = factors.unsqueeze(1)
        logits.scatter_add_(1, index, factors * (smoothing - 1))
        if smoothing:
            logits -= factors * (smoothing / classes)
        dx[part] = upsample_backward(logits, size, x[part].shape, align_corners, *scales)
        del logits  # before the next logits are computed
    return losses, dx
