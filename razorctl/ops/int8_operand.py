"""The int8 operand that stands for the activation in a weight gradient, from a few-bit copy.

The input gradient wants dy in int8 with a scale for each row: dy = r q, with scales r and codes q.
dW = dy^T x contracts the rows, so r must be multiplied into x: dW = q^T (r x), once `int8.balance`
has left half of the spread of r in q. A column of r x is at most max(r) times the largest magnitude
that the column's codes can stand for. So its int8 scale is known before the codes are unpacked, and
one pass over them is enough.
"""

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops.activation import FUNCTIONS
from razorctl.ops.int8 import LEVELS, empty_transposed, inverse, transposed
from razorctl.ops.packing import unpacked
from razorctl.ops.quantize import affine, dequantize_reference, widened


def _column_scales(
    zero_point: Tensor, scale: Tensor, bias: Tensor | None, bits: int, function: str | None
) -> tuple[Tensor, Tensor]:
    """The middle of the range that the codes of each column reach, and half its width, [columns].

    With a function the middle is 0, and half the width is the largest magnitude.
    """
    first, width = affine(zero_point, scale, bias)
    last = first + (2**bits - 1) * width
    low, high = torch.minimum(first, last), torch.maximum(first, last)
    if function is not None:  # most outputs are near 0, where rounding dy does least
        reach = FUNCTIONS[function].reach(low, high).amax(0)
        return torch.zeros_like(reach), reach
    low, high = low.amin(0) / 2, high.amax(0) / 2
    return low + high, high - low


def int8_operand_reference(
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    tile_rows: int,
    row_scale: Tensor,
    function: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `int8_operand`."""
    center, reach = _column_scales(zero_point, scale, bias, bits, function)
    copy = packed, zero_point, scale, bias, bits
    x = dequantize_reference(*copy, len(row_scale), tile_rows, center.dtype)
    x = x if function is None else FUNCTIONS[function].forward(x)
    relative = row_scale * inverse(row_scale.max())
    operand = (x - center) * inverse(reach / LEVELS) * relative
    return operand.round().to(torch.int8).t(), reach / LEVELS * row_scale.max(), center


@torch.library.custom_op("razorctl::int8_operand", mutates_args=())
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
    """int8 codes of row_scale * (x - center), transposed [columns, rows], and their scales.

    x is what `dequantize` returns for the copy, with `function` applied to it unless it is None.
    row_scale: [rows, 1]. Returns codes in -127 to 127, laid out as `int8.transposed` says, their
    scale [columns] and the center [columns]: row_scale * x is scale * code + row_scale * center, to
    within half a scale.
    """
    rows, columns = len(row_scale), scale.shape[1]
    codes = packed.new_empty(rows, columns, dtype=torch.int8)
    if not codes.numel():
        empty = torch.zeros(columns, dtype=torch.float32, device=packed.device)
        return transposed(codes), empty, empty.clone()
    center, reach = _column_scales(zero_point, scale, bias, bits, function)
    offset, scale = affine(zero_point, scale, bias)
    factor, most = inverse(reach / LEVELS), row_scale.max()
    relative = row_scale * inverse(most)
    if function is None:
        offset, scale = (offset - center) * factor, scale * factor
    for part, numbers in unpacked(packed, bits, rows, columns, tile_rows):
        values = widened(numbers, offset, scale, part)
        if function is not None:
            values = FUNCTIONS[function].forward(values).mul_(factor)
        codes[part.rows] = values.mul_(relative[part.rows]).round_()
    return transposed(codes), reach / LEVELS * most, center


@int8_operand.register_fake
def _(
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    tile_rows: int,
    row_scale: Tensor,
    function: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    center = scale.new_empty(scale.shape[1], dtype=torch.float32)
    codes = empty_transposed(row_scale.expand(-1, scale.shape[1]))
    return codes, torch.empty_like(center), center


kernels.describe(int8_operand, launches=lambda *args: 2)
kernels.attach(__name__)
