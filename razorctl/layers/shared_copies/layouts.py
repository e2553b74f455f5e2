"""Layouts: the ways in which layers show an activation to a rule.

Layers that show a rule the same rows of an activation have the same layout, by which they find each
other's copies (`sharing.Memo`).
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from razorctl.layers.autocast import compute_dtype

DERIVED = "derived"  # the layout of a derived activation, which has the shape of its tensor


def of_rows(dtype: torch.dtype) -> Hashable:
    """The layout of [rows, columns], with the last axis of an activation as columns."""
    return "rows", dtype


def of_patches(dtype: torch.dtype, size: tuple[int, ...] | None = None) -> Hashable:
    """The layout of [patches, values of a patch]; without a size, of [pixels, channels]."""
    return "patches", dtype, size


def of_channels(x: Tensor) -> Hashable:
    """The layout of `ops.images.pixels(x)`."""
    dtype = compute_dtype(x)
    return of_patches(dtype) if x.dim() > 2 else of_rows(dtype)
