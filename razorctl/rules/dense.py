"""Rules that keep every element: as it is, or in half precision."""

import torch
from torch import Tensor

from razorctl.rules.base import Kept, Rule


class Dense(Rule):
    """All of it."""

    prunes = False

    def keep(self, x: Tensor) -> Kept:
        return (x,)

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        return kept[0]


class Half(Rule):
    """All of it in half precision; values beyond the range of float16 become its largest.

    16-bit activations are kept as they are. Back Razor's choice for activation functions, whose
    derivative at 0 is not 0, so that pruning would distort it.
    """

    prunes = False

    def keep(self, x: Tensor) -> Kept:
        if x.element_size() <= 2:
            return (x,)
        limit = torch.finfo(torch.float16).max
        return x.clamp(-limit, limit).half(), x.new_empty(0)  # the second for its dtype

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        return kept[0].to(kept[-1].dtype)
