"""Images and other activations with channels first, as the rows that a rule sees.

Layers that show a rule the same rows have the same layout, by which they find each other's copies
(`sharing.Memo`).
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from razorctl.layers.autocast import to_compute_dtype
from razorctl.layers.base import flat


def pixels(x: Tensor) -> Tensor:
    """`x` [batch, channels, ...] as rows [pixels, channels]."""
    return flat(x.movedim(1, -1))


def unrolled(rows: Tensor, shape: torch.Size, like: Tensor | None = None) -> Tensor:
    """The inverse of `pixels`, for an x of `shape`; in the memory format of `like`, if given."""
    x = rows.view(shape[0], *shape[2:], rows.shape[1]).movedim(-1, 1)
    return x if like is None else x.contiguous(memory_format=memory_format(like))


def memory_format(x: Tensor) -> torch.memory_format:
    """Whether the channels of a batch of images lie last; both may be true of the same memory."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last and not x.is_contiguous() else torch.contiguous_format


def layouts(x: Tensor) -> tuple[Hashable, Hashable]:
    """The layouts that copies of `x` can have: its last axis as columns, or its second."""
    dtype = to_compute_dtype(x.new_empty(0)).dtype
    return ("linear", dtype), ("conv", dtype, None)


def layout(x: Tensor) -> Hashable:
    """The layout of `pixels(x)`."""
    return layouts(x)[x.dim() > 2]
