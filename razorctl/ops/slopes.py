"""Functions with two slopes: one bit per element selects the slope, so gradients are exact.

Forward: bit = low < x < high, for x [n]. Backward: dx = inside dy if the bit is set, else outside
dy.
"""

import math

import torch
from torch import Tensor

from razorctl.ops.op import op
from razorctl.ops.topk import empty_bits, pack_bits, unpack_bits


@op(empty=lambda x, low, high: empty_bits(x))
def slope_bits(x: Tensor, low: float, high: float) -> Tensor:
    """The packed bits of the elements of `x` [n]: set if between `low` and `high`.

    An infinite `high` is no bound.
    """
    inside = x > low
    return pack_bits(inside if high == math.inf else inside & (x < high))


@op(empty=lambda dy, *_: dy.new_empty(dy.shape))
def slope_grad(dy: Tensor, bits: Tensor, inside: float, outside: float) -> Tensor:
    """dy times `inside` if the bit is set, else times `outside`; contiguous.

    Args:
        dy: [n] or [rows, columns]; rows may be strided, as in a part of a concatenation.
        bits: The result of `slope_bits`.
        inside: The slope where a bit is set.
        outside: The other slope; with 0, even infinity and NaN become 0.
    """
    first = dy if inside == 1 else dy * inside
    second = dy * outside if outside else dy.new_zeros(())
    return torch.where(unpack_bits(bits, dy.numel()).view(dy.shape), first, second)
