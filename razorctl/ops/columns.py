"""Columns of an activation: those that a layer keeps, and their norms."""

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


def column_norms(x: Tensor) -> Tensor:
    """The L2 norm of each column of `x` [n, d], accumulated in single precision at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(x, dim=0, dtype=dtype)
    return norms


kernels.describe(gather_columns)
kernels.attach(__name__)
