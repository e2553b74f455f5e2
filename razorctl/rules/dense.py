"""Rules that keep every element: as it is, or in half precision."""

import torch
from torch import Tensor

from razorctl.rules.base import Rule
from razorctl.rules.packed import PackedValues


class Dense(Rule):
    """All of it."""

    prunes = False

    def pack(self, x: Tensor) -> PackedValues:
        return PackedValues(x.shape, x.dtype, x)

    def unpack(self, packed: PackedValues) -> Tensor:
        return packed.values


class Half(Rule):
    """All of it in half precision; values beyond the range of float16 become its largest.

    16-bit activations are kept as they are. Back Razor's choice for activation functions, whose
    derivative at 0 is not 0, so that pruning would distort it.
    """

    prunes = False

    def pack(self, x: Tensor) -> PackedValues:
        values = x
        if x.element_size() > 2:
            limit = torch.finfo(torch.float16).max
            values = x.clamp(-limit, limit).half()
        return PackedValues(x.shape, x.dtype, values)

    def unpack(self, packed: PackedValues) -> Tensor:
        return packed.values.to(packed.dtype)
