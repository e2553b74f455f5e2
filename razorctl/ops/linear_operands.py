"""All that the int8 GEMMs of a linear layer's backward pass multiply with dy, in one operation.

For dW = dy^T x these are dy with half of the spread of its rows' scales, and x with the rest of it
(`int8.balance`, `int8_operand`), for dX = dy W the weight (`int8.int8_columns`). Each is an op too.
On a card they take two launches together, where they would take seven.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops.int8 import balance, empty_transposed, int8_columns, transposed
from razorctl.ops.int8_operand import int8_operand

ALIGNED = 16  # terms of a product that int8 GEMMs read at once


def terms(rows: int) -> int:
    """How many terms an int8 GEMM takes that contracts so many rows."""
    return -(-rows // ALIGNED) * ALIGNED


def _filled(codes: Tensor) -> Tensor:
    """Codes [columns, rows] with zeros up to `terms`, laid out as before."""
    more = -codes.shape[1] % ALIGNED
    return codes if not more else transposed(F.pad(codes.t(), (0, 0, 0, more)))


@torch.library.custom_op("razorctl::linear_operands", mutates_args=())
def linear_operands(
    dy: Tensor,
    row_scale: Tensor,
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    tile_rows: int,
    function: str | None,
    weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operands of both GEMMs, from int8 rows dy [rows, out] and their scales [rows, 1].

    packed, zero_point, scale, bias, bits, tile_rows, function: a copy of x, as of `int8_operand`.
    weight: [out, in], None if dX is not wanted. Returns dy [out, terms] as `balance` does; x
    [in, terms], its scale and center [in] as `int8_operand` does; and the weight [in, out] with its
    scale [in] as `int8_columns` does, both empty, [0], without a weight. After the rows of dy there
    are zeros, after those of x anything, so that a GEMM can read `terms` of both.
    """
    balanced, shared = balance._init_fn(dy, row_scale)
    form = bits, tile_rows, shared, function
    x, x_scale, center = int8_operand._init_fn(packed, zero_point, scale, bias, *form)
    balanced, x = _filled(balanced), _filled(x)
    if weight is None:
        return balanced, x, x_scale, center, dy.new_empty(0), x_scale.new_empty(0)
    return balanced, x, x_scale, center, *int8_columns._init_fn(weight)


@linear_operands.register_fake
def _(
    dy: Tensor,
    row_scale: Tensor,
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    tile_rows: int,
    function: str | None,
    weight: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    center = scale.new_empty(scale.shape[1], dtype=torch.float32)
    rows = terms(dy.shape[0])
    x = empty_transposed(dy.new_empty(rows, scale.shape[1]))
    balanced = empty_transposed(dy.new_empty(rows, dy.shape[1]))
    of_weight = dy.new_empty(0), center.new_empty(0)
    if weight is not None:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        of_weight = empty_transposed(weight), weight.new_empty(weight.shape[1], dtype=dtype)
    return balanced, x, torch.empty_like(center), center, *of_weight


def _again(*args: Any) -> int:
    """A weight is read once for the scales of its columns, once for its codes."""
    weight: Tensor | None = args[9]
    return 0 if weight is None else weight.nbytes


kernels.describe(linear_operands, launches=lambda *args: 2, again=_again)
kernels.attach(__name__)
