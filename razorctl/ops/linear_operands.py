"""All operands of the int8 GEMMs of a linear layer's backward pass, in one op.

Given dy [rows, out], x [rows, in], W [out, in] and r, the roots of the scales of dy's int8 rows,
the operands of dW = dy^T x are dy / r, computed from these rows (`int8.int8_columns`), and r x
(`int8_operand`). The operand of dX = dy W is the weight (`int8.int8_columns`). On a card this op
takes two launches, the three separate ops six.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops.int8 import empty_transposed, int8_columns, roots, transposed
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
    dy: Tensor, row_scale: Tensor, _: Tensor, copy: FewBitCopy, function: Any, weight: Tensor | None
) -> tuple[Tensor, ...]:
    """The results of `linear_operands`, without values."""
    columns, rows = copy.scale.shape[1], terms(dy.shape[0])
    x = empty_transposed(dy.new_empty(rows, columns))
    of_dy = empty_transposed(dy.new_empty(rows, dy.shape[1]))
    dy_scale = row_scale.new_empty(dy.shape[1])
    scale, center = (dy.new_empty(columns, dtype=torch.float32) for _ in range(2))
    of_weight = dy.new_empty(0), scale.new_empty(0)
    if weight is not None:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        of_weight = empty_transposed(weight), weight.new_empty(columns, dtype=dtype)
    return of_dy, dy_scale, x, scale, center, *of_weight


def _fused(
    dy: Tensor, row_scale: Tensor, _: Tensor, copy: FewBitCopy, function: Any, weight: Tensor | None
) -> Fused:
    """The cost of `linear_operands`; the function is applied to x alone."""
    plain = terms(dy.shape[0]) * dy.shape[1] + (0 if weight is None else weight.numel())
    # A weight is read once for the scales of its columns and once for their codes.
    again = 0 if weight is None else weight.nbytes
    return Fused(launches=2, again=again, plain=0 if function is None else plain)


@op(empty=_empty, fused=_fused)
def linear_operands(
    dy: Tensor,
    row_scale: Tensor,
    largest: Tensor,
    copy: FewBitCopy,
    function: str | None,
    weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operands of both GEMMs.

    Returns dy [out, terms] and its scale [out] as `int8_columns` does; x [in, terms], its scale and
    center [in] as `int8_operand` does; and the weight [in, out] with its scale [in] as
    `int8_columns` does, both empty, [0], without a weight. GEMMs read `terms` of both: codes of dy
    are padded with zeros, codes of x with any values. A row of dy with the scale NaN counts as 0;
    its NaN is in the sum of the rows.

    Args:
        dy: int8 rows [rows, out].
        row_scale: Scales of dy [rows, 1].
        largest: As `int8.int8_rows` returns it, [out].
        copy: The copy of x.
        function: As of `int8_operand`.
        weight: [out, in], None if dX is not wanted.
    """
    root = roots(row_scale)  # dy / root = codes * root
    of_dy, dy_scale = int8_columns.body(dy, root, largest)
    x, x_scale, center = int8_operand.body(copy, root, function)
    of_dy, x = _filled(of_dy), _filled(x)
    if weight is None:
        return of_dy, dy_scale, x, x_scale, center, dy.new_empty(0), x_scale.new_empty(0)
    return of_dy, dy_scale, x, x_scale, center, *int8_columns.body(weight)
