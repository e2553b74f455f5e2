"""A cast that compilers do not move: y = x in another dtype."""

import torch
from torch import Tensor

from razorctl.ops.op import op


@op(empty=lambda x, dtype: torch.empty_like(x, dtype=dtype))
def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of `x` in another `dtype`.

    torch.compile would merge a cast in the backward pass with the same cast in the forward pass,
    and store its result for backward.
    """
    return x.to(dtype)


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in the `dtype` of a backward pass, as autocast cast it in the forward pass."""
    if weight.dtype == dtype:
        return weight
    # In a compiled program the two casts would become one, and its result would be stored.
    return cast(weight, dtype) if torch.compiler.is_compiling() else weight.to(dtype)
