"""Activation functions by name, and what a backward pass makes of few-bit codes of their input.

The codes become values, and the values a gradient or the int8 operand of the next layer's GEMM,
part by part: the input, the widest activation of a transformer, is never there as a whole.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops.chunks import chunks
from razorctl.ops.int8 import LEVELS, inverse
from razorctl.ops.quantize import dequantize_reference

aten = torch.ops.aten


@dataclass(frozen=True)
class Function:
    """x -> f(x), and (dy, x) -> f'(x) dy."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


FUNCTIONS = {
    "gelu": Function(F.gelu, aten.gelu_backward),
    "gelu-tanh": Function(
        lambda x: F.gelu(x, approximate="tanh"),
        lambda dy, x: aten.gelu_backward(dy, x, approximate="tanh"),
    ),
    "silu": Function(F.silu, aten.silu_backward),
    "quick-gelu": Function(
        lambda x: F.silu(1.702 * x) / 1.702, lambda dy, x: aten.silu_backward(dy, 1.702 * x)
    ),
}


def activation_grad_reference(
    dy: Tensor, codes: Tensor, offset: Tensor, step: Tensor, function: str
) -> Tensor:
    """See `activation_grad`."""
    x = dequantize_reference(codes, offset, step, dy.dtype)
    return FUNCTIONS[function].backward(dy, x)


@torch.library.custom_op("razorctl::activation_grad", mutates_args=())
def activation_grad(
    dy: Tensor, codes: Tensor, offset: Tensor, step: Tensor, function: str
) -> Tensor:
    """f'(x) dy for x = offset + step * code, dy and uint8 codes [blocks, rows, columns].

    Offset and step are those of each column of a block, [blocks, columns]. Computes in the dtype of
    dy, which the result has.
    """
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
    backward = FUNCTIONS[function].backward
    for part in chunks(codes):
        x = _values(codes, offset, step, part)
        dx[part] = backward(dy[part], x.to(dy.dtype))
    return dx


@activation_grad.register_fake
def _(dy: Tensor, codes: Tensor, offset: Tensor, step: Tensor, function: str) -> Tensor:
    return dy.new_empty(dy.shape)


def activation_to_int8_reference(
    codes: Tensor, bits: int, offset: Tensor, step: Tensor, function: str
) -> tuple[Tensor, Tensor]:
    """See `activation_to_int8`."""
    forward = FUNCTIONS[function].forward
    levels = torch.arange(2**bits, device=codes.device).view(-1, 1)
    reached = torch.stack([forward(o + s * levels) for o, s in zip(offset, step, strict=True)])
    scale = reached.abs().amax((0, 1)) / LEVELS
    values = forward(dequantize_reference(codes, offset, step, step.dtype)).flatten(0, 1)
    return (values * inverse(scale)).round().to(torch.int8), scale.unsqueeze(0)


@torch.library.custom_op("razorctl::activation_to_int8", mutates_args=())
def activation_to_int8(
    codes: Tensor, bits: int, offset: Tensor, step: Tensor, function: str
) -> tuple[Tensor, Tensor]:
    """`int8.to_int8` of f(x) [all rows, columns] with a scale for each column; x as above.

    What the codes can reach gives the scale, so that no value is looked at twice.
    """
    forward = FUNCTIONS[function].forward
    levels = torch.arange(2**bits, device=codes.device, dtype=step.dtype).view(-1, 1, 1)
    scale = forward(torch.addcmul(offset, levels, step)).abs_().amax((0, 1)) / LEVELS
    factor = inverse(scale)
    values = torch.empty_like(codes, dtype=torch.int8)
    for part in chunks(codes):
        values[part] = forward(_values(codes, offset, step, part)).mul_(factor).round_()
    return values.flatten(0, 1), scale.unsqueeze(0)


@activation_to_int8.register_fake
def _(
    codes: Tensor, bits: int, offset: Tensor, step: Tensor, function: str
) -> tuple[Tensor, Tensor]:
    columns = codes.shape[-1]
    values = codes.new_empty(codes.shape[0] * codes.shape[1], columns, dtype=torch.int8)
    return values, step.new_empty(1, columns)


def _values(codes: Tensor, offset: Tensor, step: Tensor, part: tuple[slice, ...]) -> Tensor:
    """Of one part: offset + step * code."""
    tile = part[:1]
    o, s = offset[tile].unsqueeze(1), step[tile].unsqueeze(1)
    return torch.addcmul(o, codes[part].to(s.dtype), s)
