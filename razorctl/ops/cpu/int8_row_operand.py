"""Kernel of ops.int8_row_operand."""

import torch
from torch import Tensor

from razorctl.ops import int8_row_operand as op
from razorctl.ops import kernels
from razorctl.ops.cpu.library import Copy, call, readable
from razorctl.ops.functions import NUMBERS
from razorctl.ops.op import FewBitCopy


@kernels.register(
    op.int8_row_operand, "cpu", lambda copy, rows, function: rows > 0 and readable(copy.scale)
)
def int8_row_operand(copy: FewBitCopy, rows: int, function: str | None) -> tuple[Tensor, Tensor]:
    codes = torch.empty(rows, copy.scale.shape[1], dtype=torch.int8)
    scale = torch.empty(rows, 1)
    call(
        "int8_row_operand", copy=Copy(copy, rows), function=NUMBERS[function], operand=codes,
        scale=scale,
    )  # fmt: skip
    return codes, scale
