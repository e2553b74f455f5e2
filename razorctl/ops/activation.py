"""Activation functions that store a few-bit copy of their input, and their gradients from it.

Forward: y = f(x), and a copy of x [rows, columns]. Backward: dx = f'(x) dy for the x of the copy.
"""

import torch
from torch import Tensor

from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.int8 import empty_rows, int8_rows
from razorctl.ops.op import FewBitCopy, Fused, op
from razorctl.ops.packing import unpacked
from razorctl.ops.quantize import affine, empty_copy, quantize, widened


@op(
    empty=lambda x, function, bits, tile_rows: (
        x.new_empty(x.shape),
        *empty_copy(x, x.shape[:-1].numel(), x.shape[-1], bits, tile_rows),
    ),
    fused=Fused(reduces=True),
)
def activation_quantize(
    x: Tensor, function: str, bits: int, tile_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """f(x) of `x`, in its dtype, and the copy of x that `quantize` returns.

    Args:
        x: [..., columns].
        function: The name of f in FUNCTIONS.
        bits: Bits of a code.
        tile_rows: Rows of a tile.
    """
    rows = x.reshape(-1, x.shape[-1])
    return FUNCTIONS[function].forward(x), *quantize.body(rows, bits, tile_rows)


@op(empty=lambda dy, *_: dy.new_empty(dy.shape), fused=Fused())
def activation_grad(dy: Tensor, copy: FewBitCopy, function: str) -> Tensor:
    """f'(x) dy for the x of a copy, dy [rows, columns], in the dtype of dy.

    x is often the widest activation of a transformer, so it is unpacked part by part, and never
    exists as a whole.
    """
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
    backward = FUNCTIONS[function].backward
    offset, scale = affine(copy)
    for part, codes in unpacked(copy, len(dy)):
        rows = part.rows
        dx[rows] = backward(dy[rows], widened(codes, offset, scale, part).to(dy.dtype))
    return dx


@op(empty=lambda dy, *_: empty_rows(dy), fused=Fused(launches=2, reduces=True))
def activation_grad_int8(
    dy: Tensor, copy: FewBitCopy, function: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`int8.int8_rows` of the result of `activation_grad`."""
    return int8_rows.body(activation_grad.body(dy, copy, function))
