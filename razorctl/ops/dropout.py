"""Dropout that hands out its mask, drawing what the stock one draws."""

import torch
import torch.nn.functional as F
from torch import Tensor


def dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Stock dropout of `x` with probability `p` in (0, 1), to the bit.

    Returns the output and the bool mask of what was not dropped. Draws from the default generator
    of x's device.
    """
    return KERNELS.get(x.device.type, _fused)(x, p)


def _fused(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    return torch.native_dropout(x, p, True)


def _product(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    noise = F.dropout(torch.ones_like(x), p)
    return x * noise, noise > 0


# The fused op draws differently from what nn.Dropout runs on a CPU, which is a product. No
# registered op, which a compiler could neither fuse nor run again on the same draw.
KERNELS = {"cpu": _product}


def dropout_backward(dy: Tensor, mask: Tensor, p: float) -> Tensor:
    """The input's gradient."""
    dx: Tensor = torch.ops.aten.native_dropout_backward(dy, mask, 1 / (1 - p))
    return dx
