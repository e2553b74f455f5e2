"""The weight gradient of a linear layer from a few-bit copy of its input."""

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops.activation import FUNCTIONS
from razorctl.ops.packing import unpacked
from razorctl.ops.quantize import affine, widened


@torch.library.custom_op("razorctl::linear_weight_grad", mutates_args=())
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
    """dy^T x [out, columns] in the dtype of dy [rows, out].

    x is what `dequantize` returns for the copy, with `function` applied to it unless it is None.
    """
    offset, scale = affine(zero_point, scale, bias)
    x = dy.new_empty(len(dy), scale.shape[1])
    for part, codes in unpacked(packed, bits, len(x), x.shape[1], tile_rows):
        values = widened(codes, offset, scale, part).to(dy.dtype)
        x[part.rows] = values if function is None else FUNCTIONS[function].forward(values)
    return dy.T @ x


@linear_weight_grad.register_fake
def _(
    dy: Tensor,
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    tile_rows: int,
    function: str | None,
) -> Tensor:
    return dy.new_empty(dy.shape[1], scale.shape[1])


kernels.attach(__name__)
