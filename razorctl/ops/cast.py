"""A cast that a compiler leaves where it is: y = x in another dtype."""

import torch
from torch import Tensor

from razorctl.ops.op import op


@op(empty=lambda x, dtype: torch.empty_like(x, dtype=dtype))
def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of `x` in another `dtype`.

    In a backward pass torch.compile would find the same cast of the forward pass, and keep that.
    """
    return x.to(dtype)
