"""Kernel of ops.weight_grad; the product is torch's."""

from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import weight_grad as op
from razorctl.ops.cpu.library import DTYPES, takes
from razorctl.ops.cpu.quantize import dequantize


def linear_weight_grad(
    dy: Tensor,
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    tile_rows: int,
    function: str | None,
) -> Tensor:
    """See `ops.weight_grad.linear_weight_grad`."""
    copy = packed, zero_point, scale, bias, bits
    return dy.T @ dequantize(*copy, len(dy), tile_rows, dy.dtype, function)


kernels.register(
    op.linear_weight_grad,
    "cpu",
    linear_weight_grad,
    lambda dy, packed, zero_point, scale, *others: (
        dy.dtype in DTYPES and len(dy) > 0 and takes(scale)
    ),
)
