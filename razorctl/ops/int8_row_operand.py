"""The int8 operand of a linear layer's product for its input, made from a few-bit copy.

y = x W^T contracts columns, so x [rows, columns] needs a scale for each row: scale = max |x| / 127,
code = round(x / scale), for the x of the copy. No value exists but in a row that is being rounded.
"""

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops.functions import applied
from razorctl.ops.int8 import inverse, scale_of
from razorctl.ops.op import FewBitCopy, Fused, op
from razorctl.ops.packing import unpacked
from razorctl.ops.quantize import affine, widened


@op(
    empty=lambda copy, rows, function: (
        copy.packed.new_empty(rows, copy.scale.shape[1], dtype=torch.int8),
        copy.packed.new_empty(rows, 1, dtype=torch.float32),
    ),
    fused=Fused(reduces=True),
)
def int8_row_operand(copy: FewBitCopy, rows: int, function: str | None) -> tuple[Tensor, Tensor]:
    """The codes [rows, columns] and scales [rows, 1] of `int8.int8_rows` for f(x).

    Args:
        copy: The copy of x.
        rows: Rows of x.
        function: The name of f in `functions.FUNCTIONS`, None for x itself.
    """
    codes = copy.packed.new_empty(rows, copy.scale.shape[1], dtype=torch.int8)
    scale = copy.packed.new_zeros(rows, 1, dtype=torch.float32)
    if not codes.numel():
        return codes, scale
    offset, spacing = affine(copy)
    for part, numbers in unpacked(copy, rows):
        values = applied(function, widened(numbers, offset, spacing, part))
        scale[part.rows] = scale_of(values, 1)
        codes[part.rows] = values.mul_(inverse(scale[part.rows])).round_()
    return codes, scale


kernels.attach(__name__)
