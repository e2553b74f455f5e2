"""The activation functions of ops, by name: each f with its derivative f'."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Function:
    """An activation function.

    forward: x -> f(x). backward: (dy, x) -> f'(x) dy. lowest: the x with the least f(x); f falls
    below it and rises above it.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    lowest: float

    def reach(self, low: Tensor, high: Tensor) -> Tensor:
        """The largest |f(x)| for x from `low` to `high`."""
        lowest = torch.full_like(low, self.lowest).clamp(low, high)
        return torch.stack([self.forward(x).abs() for x in (low, lowest, high)]).amax(0)


FUNCTIONS = {
    "gelu": Function(F.gelu, aten.gelu_backward, -0.7517915),
    "gelu-tanh": Function(
        lambda x: F.gelu(x, approximate="tanh"),
        lambda dy, x: aten.gelu_backward(dy, x, approximate="tanh"),
        -0.7524614,
    ),
    "silu": Function(F.silu, aten.silu_backward, -1.2784645),
    "quick-gelu": Function(
        lambda x: F.silu(1.702 * x) / 1.702,
        lambda dy, x: aten.silu_backward(dy, 1.702 * x),
        -1.2784645 / 1.702,
    ),
    "hardswish": Function(F.hardswish, aten.hardswish_backward, -1.5),
    "relu": Function(F.relu, lambda dy, x: aten.threshold_backward(dy, x, 0), 0.0),
    "relu6": Function(F.relu6, lambda dy, x: aten.hardtanh_backward(dy, x, 0, 6), 0.0),
    "leaky-relu": Function(  # rises everywhere
        F.leaky_relu, lambda dy, x: aten.leaky_relu_backward(dy, x, 0.01, False), -LARGEST
    ),
}
# Their numbers in C, in the order of `enum function` of cpu/common.h; None is x itself.
NUMBERS = {name: number for number, name in enumerate((None, *FUNCTIONS))}


def applied(function: str | None, x: Tensor) -> Tensor:
    """f(x) for the name of f; x itself for None."""
    return x if function is None else FUNCTIONS[function].forward(x)
