"""Dropout that returns its mask, with the random draws of stock dropout.

Forward: y = mask x / (1 - p), of any shape. Backward: dx = mask dy / (1 - p).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def dropout(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Stock dropout of `x` with probability `p` in (0, 1), equal to the bit.

    Returns the output and a bool mask, True where an element was not dropped. Draws from the
    default generator of x's device.
    """
    return KERNELS.get(x.device.type, _fused)(x, p)


def _fused(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    return torch.native_dropout(x, p, True)


def _product(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    noise = F.dropout(torch.ones_like(x), p)
    return x * noise, noise > 0


# On a CPU, nn.Dropout runs a product, which draws differently from the fused op. Neither is a
# registered op, since a compiler could not fuse it, or recompute it with the same draw.
KERNELS = {"cpu": _product}


def dropout_backward(dy: Tensor, mask: Tensor, p: float) -> Tensor:
    """The gradient of the input, of the shape of dy."""
    dx: Tensor = torch.ops.aten.native_dropout_backward(dy, mask, 1 / (1 - p))
    return dx
