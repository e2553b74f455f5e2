"""The int8 operand x of a weight gradient, computed from a few-bit copy.

dW = dy^T x contracts the rows, which cannot have scales. With r the sizes of the rows of dy,
dW = (dy / sqrt(r))^T (sqrt(r) x): each operand takes half of their spread, so that small rows have
nonzero codes in both. A column of sqrt(r) x is at most max(sqrt(r)) times the largest magnitude of
the column's codes. So its int8 scale is known before the codes are unpacked, and one pass over them
is enough.
"""

import torch
from torch import Tensor

from razorctl.ops.functions import FUNCTIONS, applied
from razorctl.ops.int8 import LEVELS, empty_transposed, inverse, transposed
from razorctl.ops.op import FewBitCopy, Fused, op
from razorctl.ops.packing import unpacked
from razorctl.ops.quantize import affine, widened


def column_scales(copy: FewBitCopy, function: str | None) -> tuple[Tensor, Tensor]:
    """The center of the range of each column's values, and half its width, [columns].

    With a function the center is 0, and half the width is the largest magnitude.
    """
    first, width = affine(copy)
    last = first + (2**copy.bits - 1) * width
    low, high = torch.minimum(first, last), torch.maximum(first, last)
    if function is not None:  # most outputs are near 0, where rounding matters least
        reach = FUNCTIONS[function].reach(low, high).amax(0)
        return torch.zeros_like(reach), reach
    low, high = low.amin(0) / 2, high.amax(0) / 2
    return low + high, high - low


@op(
    empty=lambda copy, row_scale, function: (
        empty_transposed(row_scale.expand(-1, copy.scale.shape[1])),
        copy.scale.new_empty(copy.scale.shape[1], dtype=torch.float32),
        copy.scale.new_empty(copy.scale.shape[1], dtype=torch.float32),
    ),
    fused=Fused(launches=2),
)
def int8_operand(
    copy: FewBitCopy, row_scale: Tensor, function: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """int8 codes of row_scale * (f(x) - center) for the x of a copy, transposed, and their scales.

    Returns codes [columns, rows] in -127 to 127, in the layout of `int8.transposed`, their scale
    [columns] and the center [columns]. row_scale * f(x) is scale * code + row_scale * center,
    within half a scale.

    Args:
        copy: The copy of x.
        row_scale: [rows, 1].
        function: The name of f in `functions.FUNCTIONS`, None for x itself.
    """
    rows, columns = len(row_scale), copy.scale.shape[1]
    codes = copy.packed.new_empty(rows, columns, dtype=torch.int8)
    if not codes.numel():
        empty = torch.zeros(columns, dtype=torch.float32, device=codes.device)
        return transposed(codes), empty, empty.clone()
    center, reach = column_scales(copy, function)
    offset, scale = affine(copy)
    factor, most = inverse(reach / LEVELS), row_scale.max()
    relative = row_scale * inverse(most)
    if function is None:
        offset, scale = (offset - center) * factor, scale * factor
    for part, numbers in unpacked(copy, rows):
        values = widened(numbers, offset, scale, part)
        if function is not None:
            values = applied(function, values).mul_(factor)
        codes[part.rows] = values.mul_(relative[part.rows]).round_()
    return transposed(codes), reach / LEVELS * most, center
