"""Kernel of ops.int8_operand."""

import torch
from torch import Tensor

from razorctl.ops import int8_operand as op
from razorctl.ops import kernels
from razorctl.ops.activation import FUNCTIONS as VALUES
from razorctl.ops.cpu.library import FUNCTIONS, Copy, call, pointer, takes_copy


def int8_operand(
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    tile_rows: int,
    row_scale: Tensor,
    function: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.int8_operand.int8_operand`."""
    rows, columns = len(row_scale), scale.shape[1]
    copy = Copy(packed, zero_point, scale, bias, bits, rows, tile_rows)
    lowest = 0.0 if function is None else VALUES[function].lowest
    row_scale = row_scale.contiguous()
    codes = torch.empty(rows, columns, dtype=torch.int8)
    steps, center = torch.empty(columns), torch.empty(columns)
    call(
        *("int8_operand", copy, FUNCTIONS[function], lowest, pointer(row_scale)),
        *(pointer(codes), pointer(steps), pointer(center)),
    )
    return codes.t(), steps, center


def takes_operand(
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    tile_rows: int,
    row_scale: Tensor,
    function: str | None,
) -> bool:
    """Whether `int8_operand` takes these arguments."""
    return row_scale.dtype == torch.float32 and takes_copy(scale.shape[1], scale, row_scale)


kernels.register(op.int8_operand, "cpu", int8_operand, takes_operand)
