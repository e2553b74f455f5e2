"""Kernel of ops.int8_operand."""

import torch
from torch import Tensor

from razorctl.ops import int8_operand as op
from razorctl.ops import kernels
from razorctl.ops.cpu.library import Copy, call, readable_with_codes
from razorctl.ops.functions import FUNCTIONS, NUMBERS
from razorctl.ops.op import FewBitCopy


def takes(copy: FewBitCopy, row_scale: Tensor, function: str | None) -> bool:
    """Whether the kernel takes these arguments."""
    single = row_scale.dtype == torch.float32
    return single and readable_with_codes(copy.scale.shape[1], copy.scale, row_scale)


@kernels.register(op.int8_operand, "cpu", takes)
def int8_operand(
    copy: FewBitCopy, row_scale: Tensor, function: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = len(row_scale), copy.scale.shape[1]
    codes = torch.empty(rows, columns, dtype=torch.int8)
    scale, center = torch.empty(columns), torch.empty(columns)
    call(
        "int8_operand", copy=Copy(copy, rows), function=NUMBERS[function],
        lowest=0.0 if function is None else FUNCTIONS[function].lowest,
        row_scale=row_scale.contiguous(), operand=codes, scale=scale, center=center,
    )  # fmt: skip
    return codes.t(), scale, center
