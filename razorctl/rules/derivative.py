"""The rule that keeps what tells the derivative of an activation function, and nothing else."""

from torch import Tensor

from razorctl.ops.buckets import from_buckets, to_buckets
from razorctl.rules.base import Rule
from razorctl.rules.packed import PackedIntervals


class Buckets(Rule):
    """Of the input of an activation function, the interval that tells its derivative best.

    Unpacks to a stand-in with that derivative; see `ops.buckets`. It stands for nothing else: least
    of all for the output, which the next layer packs for itself.
    """

    prunes = False

    def __init__(self, bits: int, function: str) -> None:
        self.bits, self.function = bits, function

    def pack(self, x: Tensor) -> PackedIntervals:
        packed = to_buckets(x, self.function, self.bits)
        return PackedIntervals(x.shape, x.dtype, packed, self.bits, self.function)

    def unpack(self, packed: PackedIntervals) -> Tensor:
        shape = list(packed.shape)
        x: Tensor = from_buckets(packed.packed, shape, packed.function, packed.bits, packed.dtype)
        return x
