"""Cross-entropy of the enlarged logits of images, which never exist for a whole batch.

Logits z = enlarged x, loss = logsumexp(z) - sum t z of each pixel [batch, height, width]; and the
gradient dx [batch, classes, h, w], what enlarging sends back of factor (p - t).

Segmentation models compute logits of a low resolution and enlarge them to that of the labels. With
p the softmax of a pixel's logits and t its target, smoothed or not, the gradient of its loss with
respect to them is p - t. So the pass over parts of the images that computes the losses can compute
the gradient of the low resolution too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops.op import op

BYTES = 2**28  # of the enlarged logits of a part in single precision, if an image is not larger

upsample = torch.ops.aten.upsample_bilinear2d.default
upsample_backward = torch.ops.aten.upsample_bilinear2d_backward.default


def part_images(classes: int, size: Sequence[int]) -> int:
    """Images whose enlarged logits exist at a time."""
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
    """The cross-entropy of each pixel of bilinearly enlarged logits, and a gradient of them.

    x: logits [batch, classes, h, w]. target: classes, int64 [batch, height, width], of the size
    that x is enlarged to; a pixel whose target is `ignore_index` has loss 0 and no gradient.
    align_corners, scale_h, scale_w: as aten::upsample_bilinear2d takes them. smoothing: as
    `label_smoothing` of `F.cross_entropy`. factor: [batch, height, width], None for ones. Returns
    the losses [batch, height, width], in single precision at least, and the gradient of the sum of
    factor * loss with respect to x, in its dtype; empty, [0], if `gradient` is false.
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
        given = taken.to(dtype)
        if factor is not None:
            given = given * factor[part]
        logits.mul_(total.reciprocal_().mul_(given).unsqueeze(1))
        given = given.unsqueeze(1)
        logits.scatter_add_(1, index, given * (smoothing - 1))
        if smoothing:
            logits -= given * (smoothing / classes)
        dx[part] = upsample_backward(logits, size, x[part].shape, align_corners, *scales)
        del logits  # before the next are made
    return losses, dx


kernels.attach(__name__)
