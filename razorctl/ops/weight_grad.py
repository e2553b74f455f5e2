"""The weight gradient of a linear layer from a few-bit copy of its input.

Forward: y = x W^T for x [rows, columns] and W [out, columns]. Backward: dW = dy^T x, for the x of
the copy.
"""

from torch import Tensor

from razorctl.ops.functions import applied
from razorctl.ops.op import FewBitCopy, op
from razorctl.ops.packing import unpacked
from razorctl.ops.quantize import affine, widened


@op(empty=lambda dy, copy, function: dy.new_empty(dy.shape[1], copy.scale.shape[1]))
def linear_weight_grad(dy: Tensor, copy: FewBitCopy, function: str | None) -> Tensor:
    """dy^T f(x) [out, columns] for the x of a copy, in the dtype of dy [rows, out].

    function: the name of f in `functions.FUNCTIONS`, None for x itself.
    """
    offset, scale = affine(copy)
    x = dy.new_empty(len(dy), scale.shape[1])
    for part, codes in unpacked(copy, len(x)):
        values = widened(codes, offset, scale, part).to(dy.dtype)
        x[part.rows] = applied(function, values)
    return dy.T @ x
