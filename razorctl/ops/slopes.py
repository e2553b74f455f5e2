"""Functions with two slopes: one bit for each element tells which, and so the exact gradient.

Forward: bit = low < x < high, for x [n]. Backward: dx = dy inside where it is set, else dy outside.
"""

import math

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops.op import op
from razorctl.ops.topk import empty_bits, pack_bits, unpack_bits


@op(empty=lambda x, low, high: empty_bits(x))
def slope_bits(x: Tensor, low: float, high: float) -> Tensor:
    """Which elements of `x` [n] lie between `low` and `high`, as `topk.pack_bits` packs them.

    An infinite `high` bounds nothing.
    """
    inside = x > low
    return pack_bits(inside if high == math.inf else inside & (x < high))


@op(empty=lambda dy, *_: dy.new_empty(dy.shape))
def slope_grad(dy: Tensor, bits: Tensor, inside: float, outside: float) -> Tensor:
    """dy [n] or [rows, columns] times `inside` where a bit of `slope_bits` is set, else `outside`.

    Rows of dy may lie apart, as in a part of a concatenation; the result is dense. With 0 for
    `outside`, even what is not finite becomes 0 there.
    """
    first = dy if inside == 1 else dy * inside
    second = dy * outside if outside else dy.new_zeros(())
    return torch.where(unpack_bits(bits, dy.numel()).view(dy.shape), first, second)


kernels.attach(__name__)
