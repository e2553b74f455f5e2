"""Kernels of ops.activation."""

import torch
from torch import Tensor

from razorctl.ops import activation as op
from razorctl.ops import kernels
from razorctl.ops.cpu.library import DTYPES, FUNCTIONS, Copy, call, pointer, takes_copy
from razorctl.ops.cpu.quantize import quantize, takes_quantize
from razorctl.ops.int8 import empty_rows


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


def activation_grad_int8(
    dy: Tensor,
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bits: int,
    tile_rows: int,
    function: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.activation.activation_grad_int8`."""
    copy = Copy(packed, zero_point, scale, None, bits, len(dy), tile_rows)
    codes, each, total = empty_rows(dy)
    call(
        *("activation_grad_int8", copy, FUNCTIONS[function], pointer(dy), dy.stride(0)),
        *(DTYPES[dy.dtype], pointer(codes), pointer(each), pointer(total)),
    )
    return codes, each, total


def takes_grad(dy: Tensor, packed: Tensor, zero_point: Tensor, scale: Tensor, *_: object) -> bool:
    """Whether `activation_grad` takes these arguments."""
    return takes_copy(dy.shape[1], dy, scale)


kernels.register(
    op.activation_quantize,
    "cpu",
    activation_quantize,
    lambda x, *others: takes_quantize(x.reshape(-1, x.shape[-1])),
)
kernels.register(op.activation_grad, "cpu", activation_grad, takes_grad)
kernels.register(op.activation_grad_int8, "cpu", activation_grad_int8, takes_grad)
