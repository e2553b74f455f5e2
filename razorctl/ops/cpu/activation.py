"""Kernels of ops.activation; PyTorch computes the functions."""

import torch
from torch import Tensor

from razorctl.ops import activation as op
from razorctl.ops import kernels
from razorctl.ops.cpu.library import DTYPES, Copy, call, readable_with_codes
from razorctl.ops.cpu.quantize import quantize, takes_quantize
from razorctl.ops.functions import FUNCTIONS, NUMBERS
from razorctl.ops.int8 import empty_rows
from razorctl.ops.op import FewBitCopy


def takes_grad(dy: Tensor, copy: FewBitCopy, function: str) -> bool:
    """Whether the kernels take a gradient."""
    return readable_with_codes(dy.shape[1], dy, copy.scale)


@kernels.register(
    op.activation_quantize, "cpu", lambda x, *_: takes_quantize(x.reshape(-1, x.shape[-1]))
)
def activation_quantize(
    x: Tensor, function: str, bits: int, tile_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = x.reshape(-1, x.shape[-1])
    return FUNCTIONS[function].forward(x), *quantize(rows, bits, tile_rows)


@kernels.register(op.activation_grad, "cpu", takes_grad)
def activation_grad(dy: Tensor, copy: FewBitCopy, function: str) -> Tensor:
    dx = torch.empty_like(dy, memory_format=torch.contiguous_format)
    call(
        "activation_grad", copy=Copy(copy, len(dy)), function=NUMBERS[function],
        dy=dy, row_stride=dy.stride(0), dx=dx, dtype=DTYPES[dy.dtype],
    )  # fmt: skip
    return dx


@kernels.register(op.activation_grad_int8, "cpu", takes_grad)
def activation_grad_int8(
    dy: Tensor, copy: FewBitCopy, function: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes, scale, total, largest = empty_rows(dy)
    call(
        "activation_grad_int8", copy=Copy(copy, len(dy)), function=NUMBERS[function], dy=dy,
        row_stride=dy.stride(0), dtype=DTYPES[dy.dtype], codes=codes, scale=scale, total=total,
        largest=largest,
    )  # fmt: skip
    return codes, scale, total, largest
