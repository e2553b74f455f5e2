"""Rules that store every element: as it is, or in half precision."""

import torch
from torch import Tensor

from razorctl.rules.base import Rule
from razorctl.rules.packed import PackedValues


class Dense(Rule):
    """All elements as they are."""

    prunes = False

    def pack(self, x: Tensor) -> PackedValues:
        return PackedValues(x.shape, x.dtype, x)


class Half(Rule):
    """All elements in half precision; values beyond float16's range become its largest.

    Activations of 16 bits are stored as they are. Back Razor stores inputs of activation functions
    by this rule: their derivative at 0 is not 0, so pruning would make it wrong.
    """

    prunes = False

    def pack(self, x: Tensor) -> PackedValues:
        values = x
        if x.element_size() > 2:
            limit = torch.finfo(torch.float16).max
            values = x.clamp(-limit, limit).half()
        return PackedValues(x.shape, x.dtype, values)
