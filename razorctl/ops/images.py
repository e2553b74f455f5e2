"""Images [batch, channels, ...] as rows [pixels, channels], and few-bit copies of them.

Forward: the copy of x, or of (x - mean) rstd. Backward: f(x) for the x of the copy, as images.

The ops here convert images with channels first to a copy and back, without storing rows. They have
kernels for CPUs; other devices form rows first, for the ops of `quantize`.
"""

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops.functions import applied
from razorctl.ops.op import FewBitCopy, op
from razorctl.ops.quantize import dequantize, empty_copy, quantize


def pixels(x: Tensor) -> Tensor:
    """`x` [batch, channels, ...] as rows [pixels, channels]."""
    return x.movedim(1, -1).reshape(-1, x.shape[1])


def unrolled(rows: Tensor, shape: torch.Size, like: Tensor | None = None) -> Tensor:
    """The inverse of `pixels`, for an x of `shape`; in the memory format of `like`, if any."""
    x = rows.view(shape[0], *shape[2:], rows.shape[1]).movedim(-1, 1)
    return x if like is None else x.contiguous(memory_format=memory_format(like))


def memory_format(x: Tensor) -> torch.memory_format:
    """The memory format of images; contiguous if both formats fit."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not x.is_contiguous() else torch.contiguous_format


def as_they_lie(device: torch.device, shape: torch.Size, form: torch.memory_format) -> bool:
    """Whether to use the ops here for images of `shape`, since rows of them would be a copy."""
    first = form is torch.contiguous_format and shape[2:].numel() > 1
    return first and kernels.on_cpu(device)


def normalized_images(x: Tensor, mean: Tensor | None, rstd: Tensor | None) -> Tensor:
    """(x - mean) * rstd in the dtype of `x`, or x itself without rstd.

    mean, rstd: [1 or batch, channels].
    """
    if mean is None or rstd is None:
        return x
    shape = [*mean.shape] + [1] * (x.dim() - 2)
    return (x - mean.view(shape)).mul_(rstd.view(shape)).to(x.dtype)


@op(
    empty=lambda x, bits, tile_rows, *_: empty_copy(
        x, x.shape[0] * x.shape[2:].numel(), x.shape[1], bits, tile_rows
    )
)
def quantize_images(
    x: Tensor,
    bits: int,
    tile_rows: int,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize` of the `pixels` of `x` [batch, channels, ...], or of `normalized_images`."""
    return quantize.body(pixels(normalized_images(x, mean, rstd)), bits, tile_rows)


@op(empty=lambda copy, dtype, function, shape: copy.packed.new_empty(shape, dtype=dtype))
def dequantize_images(
    copy: FewBitCopy, dtype: torch.dtype, function: str | None, shape: list[int]
) -> Tensor:
    """f(x) for the images x of a copy of their pixels, with channels first.

    Args:
        copy: The copy.
        dtype: The dtype of x and f(x).
        function: The name of f in `functions.FUNCTIONS`, None for x itself.
        shape: The shape of x.
    """
    size = torch.Size(shape)
    rows = size[0] * size[2:].numel()
    x = unrolled(dequantize.body(copy, rows, dtype), size).contiguous()
    return applied(function, x)
