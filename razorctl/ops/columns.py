"""Column gather: the part of an activation that a column-pruned layer keeps."""

import torch
from torch import Tensor

from razorctl.ops import kernels


def gather_columns_reference(x: Tensor, index: Tensor) -> Tensor:
    """x[:, index] as a new contiguous tensor; see `gather_columns`."""
    return x.index_select(1, index)


@torch.library.custom_op("razorctl::gather_columns", mutates_args=())
def gather_columns(x: Tensor, index: Tensor) -> Tensor:
    """The columns `index` [s, int64] of `x` [n, d], contiguous [n, s]."""
    return gather_columns_reference(x, index)


@gather_columns.register_fake
def _(x: Tensor, index: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], index.shape[0])


kernels.describe(gather_columns)
kernels.attach(__name__)
