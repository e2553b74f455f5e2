"""The rule that keeps only what the derivative of an activation function needs."""

from torch import Tensor

from razorctl.ops.buckets import to_buckets
from razorctl.rules.base import Rule
from razorctl.rules.packed import PackedIntervals


class Buckets(Rule):
    """The interval that each element lies in, which tells the derivative (Novikov et al., 2023).

    The next layer packs the output of the activation function for itself.
    """

    prunes = False

    def __init__(self, bits: int, function: str, again: bool = False) -> None:
        self.bits, self.function, self.again = bits, function, again

    def pack(self, x: Tensor) -> PackedIntervals:
        packed = to_buckets(x, self.function, self.bits)
        return PackedIntervals(x.shape, x.dtype, packed, self.bits, self.function)
