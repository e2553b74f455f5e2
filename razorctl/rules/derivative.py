"""The rule that keeps what tells the derivative of an activation function, and nothing else."""

import torch
from torch import Tensor

from razorctl.ops.buckets import from_buckets, to_buckets
from razorctl.rules.base import Kept, Rule


class Buckets(Rule):
    """Of the input of an activation function, the interval that tells its derivative best.

    Restores a stand-in with that derivative; see `ops.buckets`. It stands for nothing else: least
    of all for the output, which the next layer keeps for itself.
    """

    prunes = False

    def __init__(self, bits: int, function: str = "gelu") -> None:
        self.bits, self.function = bits, function

    def keep(self, x: Tensor) -> Kept:
        return to_buckets(x, self.function, self.bits), x.new_empty(0)  # the second for its dtype

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        packed, like = kept
        x: Tensor = from_buckets(packed, list(shape), self.function, self.bits, like.dtype)
        return x

    def of_function(self, function: str) -> Rule:
        return Buckets(self.bits, function)
