"""A cast that compilers do not move: y = x in another dtype."""

import torch
from torch import Tensor

from razorctl.ops.op import op


@op(empty=lambda x, dtype: torch.empty_like(x, dtype=dtype))
def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of `x` in another `dtype`.

    For a cast in the backward pass, torch.compile would reuse the same cast of the forward pass,
    and keep its result for backward.
    """
    return x.to(dtype)
