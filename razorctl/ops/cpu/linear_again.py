"""Kernel of ops.linear_again."""

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import linear_again as op
from razorctl.ops.cpu.library import Copy, call, readable
from razorctl.ops.functions import NUMBERS
from razorctl.ops.gemm import scaled_gemm
from razorctl.ops.int8 import int8_rows
from razorctl.ops.op import FewBitCopy


def row_operand(copy: FewBitCopy, rows: int, function: str | None) -> tuple[Tensor, Tensor]:
    """See `op.row_operand`."""
    codes = torch.empty(rows, copy.scale.shape[1], dtype=torch.int8)
    scale = torch.empty(rows, 1)
    call(
        "int8_row_operand", copy=Copy(copy, rows), function=NUMBERS[function], operand=codes,
        scale=scale,
    )  # fmt: skip
    return codes, scale


@kernels.register(op.linear_again, "cpu", lambda copy, rows, *_: rows > 0 and readable(copy.scale))
def linear_again(
    copy: FewBitCopy,
    rows: int,
    function: str | None,
    weight: Tensor,
    offset: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    codes, scale = row_operand(copy, rows, function)
    outputs, out_scale, _ = int8_rows(weight)
    left, right = op.outer(offset, scale)
    return scaled_gemm(codes, outputs, scale, out_scale.squeeze(1), dtype, left, right)
