"""Activation functions by name, and their gradient from a few-bit copy of their input."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops.int8 import empty_rows, int8_rows
from razorctl.ops.packing import packed_bytes, unpacked
from razorctl.ops.quantize import affine, dequantize_reference, quantized, tiles, widened

aten = torch.ops.aten
LARGEST = torch.finfo(torch.float32).max


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
    "hardswish": Function(F.hardswish, aten.hardswish_backward, -1.5),
    "relu": Function(F.relu, lambda dy, x: aten.threshold_backward(dy, x, 0), 0.0),
    "relu6": Function(F.relu6, lambda dy, x: aten.hardtanh_backward(dy, x, 0, 6), 0.0),
    "leaky-relu": Function(  # it falls nowhere
        F.leaky_relu, lambda dy, x: aten.leaky_relu_backward(dy, x, 0.01, False), -LARGEST
    ),
}


@torch.library.custom_op("razorctl::activation_quantize", mutates_args=())
def activation_quantize(
    x: Tensor, function: str, bits: int, tile_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """f(x) of `x` [..., columns] in its dtype, and x as `quantize` packs it.

    function: the name of f in FUNCTIONS.
    """
    rows = x.reshape(-1, x.shape[-1])
    return FUNCTIONS[function].forward(x), *quantized(rows, bits, tile_rows)


@activation_quantize.register_fake
def _(x: Tensor, function: str, bits: int, tile_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = x.shape[:-1].numel(), x.shape[-1]
    zero_point = x.new_empty(tiles(rows, tile_rows), columns, dtype=torch.int16)
    return (
        x.new_empty(x.shape),
        x.new_empty(packed_bytes(rows, columns, bits), dtype=torch.uint8),
        zero_point,
        torch.empty_like(zero_point, dtype=torch.bfloat16),
    )


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


@torch.library.custom_op("razorctl::activation_grad_int8", mutates_args=())
def activation_grad_int8(
    dy: Tensor,
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bits: int,
    tile_rows: int,
    function: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `int8.int8_rows` makes of what `activation_grad` returns."""
    dx = activation_grad._init_fn(dy, packed, zero_point, scale, bits, tile_rows, function)
    copy: tuple[Tensor, Tensor, Tensor] = int8_rows._init_fn(dx)
    return copy


@activation_grad_int8.register_fake
def _(
    dy: Tensor,
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bits: int,
    tile_rows: int,
    function: str,
) -> tuple[Tensor, Tensor, Tensor]:
    copy: tuple[Tensor, Tensor, Tensor] = empty_rows(dy)
    return copy


kernels.describe(activation_grad_int8, launches=lambda *args: 2, reduces=True)
kernels.describe(activation_quantize, reduces=True)
kernels.describe(activation_grad)
kernels.attach(__name__)
