"""Activation functions by name, and their gradient from a few-bit copy of their input."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops.packing import unpacked
from razorctl.ops.quantize import affine, dequantize_reference, widened

aten = torch.ops.aten


@dataclass(frozen=True)
class Function:
    """forward: x -> f(x). backward: (dy, x) -> f'(x) dy.

    lowest: the x where f is least; f falls up to it and rises from it.
    """

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    lowest: float

    def reach(self, low: Tensor, high: Tensor) -> Tensor:
        """The largest |f(x)| for x from `low` to `high`."""
        between = torch.full_like(low, self.lowest).clamp(low, high)
        return torch.stack([self.forward(x).abs() for x in (low, between, high)]).amax(0)


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
}


def activation_grad_reference(
    dy: Tensor,
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bits: int,
    tile_rows: int,
    function: str,
) -> Tensor:
    """See `activation_grad`."""
    copy = packed, zero_point, scale, None, bits
    return FUNCTIONS[function].backward(
        dy, dequantize_reference(*copy, len(dy), tile_rows, dy.dtype)
    )


@torch.library.custom_op("razorctl::activation_grad", mutates_args=())
def activation_grad(
    dy: Tensor,
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bits: int,
    tile_rows: int,
    function: str,
) -> Tensor:
    """f'(x) dy for the x that `quantize` made a copy of, dy [rows, columns].

    Computes and returns in the dtype of dy. x is often the widest activation of a transformer, so
    it is unpacked part by part and never exists as a whole.
    """
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
    backward = FUNCTIONS[function].backward
    offset, scale = affine(zero_point, scale, None)
    for part, codes in unpacked(packed, bits, len(dy), dy.shape[1], tile_rows):
        rows = part.rows
        dx[rows] = backward(dy[rows], widened(codes, offset, scale, part).to(dy.dtype))
    return dx


@activation_grad.register_fake
def _(
    dy: Tensor,
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bits: int,
    tile_rows: int,
    function: str,
) -> Tensor:
    return dy.new_empty(dy.shape)
