"""Kernels of ops.activation."""

import torch
from torch import Tensor

from razorctl.ops import activation as op
from razorctl.ops import kernels
from razorctl.ops.cpu.library import DTYPES, FUNCTIONS, Copy, call, pointer, takes_copy
from razorctl.ops.cpu.quantize import quantize, takes_quantize


def activation_quantize(
    x: Tensor, function: str, bits: int, tile_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `ops.activation.activation_quantize`; torch computes the function."""
    rows = x.reshape(-1, x.shape[-1])
    return op.FUNCTIONS[function].forward(x), *quantize(rows, bits, tile_rows)


def activation_grad(
    dy: Tensor,
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bits: int,
    tile_rows: int,
    function: str,
) -> Tensor:
    """See `ops.activation.activation_grad`."""
    copy = Copy(packed, zero_point, scale, None, bits, len(dy), tile_rows)
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
    call(
        *("activation_grad", copy, FUNCTIONS[function], pointer(dy), dy.stride(0)),
        *(pointer(dx), DTYPES[dy.dtype]),
    )
    return dx


kernels.register(
    op.activation_quantize,
    "cpu",
    activation_quantize,
    lambda x, *others: takes_quantize(x.reshape(-1, x.shape[-1])),
)
kernels.register(
    op.activation_grad,
    "cpu",
    activation_grad,
    lambda dy, packed, zero_point, scale, *others: takes_copy(dy.shape[1], dy, scale),
)
