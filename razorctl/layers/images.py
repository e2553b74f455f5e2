"""The layouts of what layers show a rule of images and other activations with channels first.

Layers that show a rule the same rows have the same layout, by which they find each other's copies
(`sharing.Memo`).
"""

from collections.abc import Hashable

from torch import Tensor

from razorctl.layers.autocast import compute_dtype


def layouts(x: Tensor) -> tuple[Hashable, Hashable]:
    """The layouts that copies of `x` can have: its last axis as columns, or its second."""
    dtype = compute_dtype(x)
    return ("linear", dtype), ("conv", dtype, None)


def layout(x: Tensor) -> Hashable:
    """The layout of `ops.images.pixels(x)`."""
    return layouts(x)[int(x.dim() > 2)]  # torch 2.11 compiles no bool as an index
