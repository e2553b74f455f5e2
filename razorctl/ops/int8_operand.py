"""The int8 operand that stands for the activation in a weight gradient, from a few-bit copy.

The input gradient wants dy in int8 with a scale for each row: dy = r q, with scales r and codes q.
dW = dy^T x contracts the rows, so r must be multiplied into x: dW = q^T (r x), once `int8.balance`
has left half of the spread of r in q. A column of r x is at most max(r) times the largest magnitude
that the column's codes can stand for. So its int8 scale is known before the codes are unpacked, and
one pass over them is enough.
"""

import torch
from torch import Tensor

from razorctl.ops.activation import FUNCTIONS
from razorctl.ops.int8 import LEVELS, inverse
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
    row_scale: Tensor,
    function: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `int8_operand`."""
    center, reach = _column_scales(zero_point, scale, bias, bits, function)
    rows = len(row_scale) // len(scale)
    x = dequantize_reference(packed, zero_point, scale, bias, bits, rows, center.dtype)
    x = x.flatten(0, 1) if function is None else FUNCTIONS[function].forward(x.flatten(0, 1))
    relative = row_scale * inverse(row_scale.max())
    operand = (x - center) * inverse(reach / LEVELS) * relative
    return operand.round().to(torch.int8).T, reach / LEVELS * row_scale.max(), center


@torch.library.custom_op("razorctl::int8_operand", mutates_args=())
def int8_operand(
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    row_scale: Tensor,
    function: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """int8 codes of row_scale * (x - center), transposed [columns, all rows], and their scales.

    x is what `dequantize` returns for the copy, with `function` applied to it unless it is None,
    and with the blocks stacked along rows. row_scale: [all rows, 1]. Returns codes in -127 to 127,
    their scale [columns] and the center [columns]: row_scale * x is scale * code + row_scale *
    center, to within half a scale. The codes are a transposed view of [all rows, columns].
    """
    rows, columns = len(row_scale), scale.shape[1]
    codes = packed.new_empty(rows, columns, dtype=torch.int8)
    if not codes.numel():
        empty = torch.zeros(columns, dtype=torch.float32, device=packed.device)
        return codes.t(), empty, empty.clone()
    center, reach = _column_scales(zero_point, scale, bias, bits, function)
    offset, scale = affine(zero_point, scale, bias)
    factor, most = inverse(reach / LEVELS), row_scale.max()
    relative = (row_scale * inverse(most)).view(len(scale), -1, 1)
    tiles = codes.view(len(scale), -1, columns)
    if function is None:
        offset, scale = (offset - center) * factor, scale * factor
    for part, numbers in unpacked(packed, bits, (len(scale), tiles.shape[1], columns)):
        values = widened(numbers, offset, scale, part)
        if function is not None:
            values = FUNCTIONS[function].forward(values).mul_(factor)
        tiles[part] = values.mul_(relative[part]).round_()
    return codes.t(), reach / LEVELS * most, center


@int8_operand.register_fake
def _(
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    row_scale: Tensor,
    function: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    columns = scale.shape[1]
    codes = packed.new_empty(len(row_scale), columns, dtype=torch.int8).t()
    center = scale.new_empty(columns, dtype=torch.float32)
    return codes, torch.empty_like(center), center
