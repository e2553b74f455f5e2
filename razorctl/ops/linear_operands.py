"""All operands of the int8 GEMMs of a linear layer's backward pass, in one op.

For dW = dy^T x the operands are dy with half of the spread of its rows' scales (`int8.balance`),
and x with the other half (`int8_operand`); for dX = dy W the weight (`int8.int8_columns`); dy
[rows, out], x [rows, in], W [out, in]. On a card this op takes two launches, the three separate ops
seven.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops.int8 import balance, empty_transposed, int8_columns, transposed
from razorctl.ops.int8_operand import int8_operand
from razorctl.ops.op import FewBitCopy, Fused, op

ALIGNED = 16  # terms of a product that int8 GEMMs read at once


def terms(rows: int) -> int:
    """The number of terms of an int8 GEMM that contracts `rows`."""
    return -(-rows // ALIGNED) * ALIGNED


def _filled(codes: Tensor) -> Tensor:
    """Codes [columns, rows] padded with zeros to `terms`, in the same layout."""
    more = -codes.shape[1] % ALIGNED
    return codes if not more else transposed(F.pad(codes.t(), (0, 0, 0, more)))


def _empty(
    dy: Tensor, row_scale: Tensor, copy: FewBitCopy, function: str | None, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The results of `linear_operands`, without values."""
    columns, rows = copy.scale.shape[1], terms(dy.shape[0])
    x = empty_transposed(dy.new_empty(rows, columns))
    balanced = empty_transposed(dy.new_empty(rows, dy.shape[1]))
    scale, center = (dy.new_empty(columns, dtype=torch.float32) for _ in range(2))
    of_weight = dy.new_empty(0), scale.new_empty(0)
    if weight is not None:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        of_weight = empty_transposed(weight), weight.new_empty(columns, dtype=dtype)
    return balanced, x, scale, center, *of_weight


@op(
    empty=_empty,
    # A weight is read once for the scales of its columns and once for its codes.
    fused=lambda dy, row_scale, copy, function, weight: Fused(
        launches=2, again=0 if weight is None else weight.nbytes
    ),
)
def linear_operands(
    dy: Tensor, row_scale: Tensor, copy: FewBitCopy, function: str | None, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operands of both GEMMs.

    Returns dy [out, terms] as `balance` does; x [in, terms], its scale and center [in] as
    `int8_operand` does; and the weight [in, out] with its scale [in] as `int8_columns` does, both
    empty, [0], without a weight. Codes of dy are padded with zeros, codes of x with any values, so
    that a GEMM can read `terms` of both.

    Args:
        dy: int8 rows [rows, out].
        row_scale: Scales of dy [rows, 1].
        copy: The copy of x.
        function: As of `int8_operand`.
        weight: [out, in], None if dX is not wanted.
    """
    balanced, shared = balance.body(dy, row_scale)
    x, x_scale, center = int8_operand.body(copy, shared, function)
    balanced, x = _filled(balanced), _filled(x)
    if weight is None:
        return balanced, x, x_scale, center, dy.new_empty(0), x_scale.new_empty(0)
    return balanced, x, x_scale, center, *int8_columns.body(weight)
