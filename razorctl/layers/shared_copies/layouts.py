"""Layouts: the ways in which an activation is turned into rows for a rule.

Layers that turn an activation into the same rows have the same layout, and can share its copy
(`memo.Memo`).
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from razorctl.layers.autocast import compute_dtype

DERIVED = "derived"  # the layout of a derived activation, which has the shape of its tensor


def of_rows(dtype: torch.dtype) -> Hashable:
    """The layout [rows, columns]: the last axis of an activation is the columns."""
    return "rows", dtype


def of_patches(dtype: torch.dtype, size: tuple[int, ...] | None = None) -> Hashable:
    """The layout [patches, values of a patch]; without a size [pixels, channels]."""
    return "patches", dtype, size


def of_channels(x: Tensor) -> Hashable:
    """The layout of `ops.images.pixels(x)`."""
    dtype = compute_dtype(x)
    return of_patches(dtype) if x.dim() > 2 else of_rows(dtype)
