"""Columns x[:, index] of an activation [n, d], which a layer stores, and norms of all columns."""

import torch
from torch import Tensor

from razorctl.ops.op import Fused, op


@op(empty=lambda x, index: x.new_empty(x.shape[0], index.shape[0]), fused=Fused())
def gather_columns(x: Tensor, index: Tensor) -> Tensor:
    """The columns `index` [s, int64] of `x` [n, d], contiguous [n, s]."""
    return x.index_select(1, index)


def column_norms(x: Tensor) -> Tensor:
    """The L2 norm of each column of `x` [n, d], accumulated in single precision at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(x, dim=0, dtype=dtype)
    return norms
