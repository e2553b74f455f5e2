"""Kernels of ops.linear_again."""

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import linear_again as op
from razorctl.ops.chunks import ELEMENTS
from razorctl.ops.cpu.library import DTYPES, Copy, call, readable
from razorctl.ops.functions import NUMBERS
from razorctl.ops.gemm import COPY_ROWS, scaled_gemm
from razorctl.ops.int8 import int8_rows
from razorctl.ops.op import FewBitCopy
from razorctl.ops.quantize import quantize


def row_operand(copy: FewBitCopy, rows: int, function: str | None) -> tuple[Tensor, Tensor]:
    """See `op.row_operand`."""
    codes = torch.empty(rows, copy.scale.shape[1], dtype=torch.int8)
    scale = torch.empty(rows, 1)
    call(
        "int8_row_operand", copy=Copy(copy, rows), function=NUMBERS[function], operand=codes,
        scale=scale,
    )  # fmt: skip
    return codes, scale


def takes(copy: FewBitCopy, rows: int, *_: object) -> bool:
    """Whether the kernel takes these arguments."""
    return rows > 0 and readable(copy.scale)


@kernels.register(op.row_operands, "cpu", takes)
def row_operands(
    copy: FewBitCopy, rows: int, function: str | None, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    copy, weight = op.evened(copy, function, weight)
    outputs, out_scale, *_ = int8_rows(weight)
    return *row_operand(copy, rows, function), outputs, out_scale.squeeze(1)


@kernels.register(op.linear_again, "cpu", takes)
def linear_again(
    copy: FewBitCopy,
    rows: int,
    function: str | None,
    weight: Tensor,
    offset: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    codes, scale, outputs, out_scale = row_operands(copy, rows, function, weight)
    return scaled_gemm(codes, outputs, scale, out_scale, dtype, *op.outer(offset, scale))


@kernels.register(
    op.linear_copy_again,
    "cpu",
    lambda copy, rows, function, weight, offset, dtype: (
        rows > 0 and dtype in DTYPES and readable(copy.scale, weight)
    ),
)
def linear_copy_again(
    copy: FewBitCopy,
    rows: int,
    function: str | None,
    weight: Tensor,
    offset: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale, outputs, out_scale = row_operands(copy, rows, function, weight)
    left, right = op.outer(offset, scale)

    def copy_of(part: slice) -> tuple[Tensor, Tensor, Tensor]:
        scales = scale[part], out_scale
        some = None if left is None else left[part]
        y = scaled_gemm(codes[part], outputs, *scales, torch.float32, some, right)
        return quantize(y, op.BITS, COPY_ROWS)

    size = max(1, ELEMENTS // (len(weight) * COPY_ROWS)) * COPY_ROWS
    return op.copied(codes, rows, len(weight), size, copy_of)
