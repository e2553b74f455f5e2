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


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in the `dtype` of a backward pass, which autocast has cast in the forward pass."""
    if weight.dtype == dtype:
        return weight
    # Compiled, the two casts would become one, whose result would be kept.
    return cast(weight, dtype) if torch.compiler.is_compiling() else weight.to(dtype)
