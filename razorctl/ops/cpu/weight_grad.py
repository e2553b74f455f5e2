"""Kernel of ops.weight_grad; PyTorch computes the product."""

from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import weight_grad as op
from razorctl.ops.cpu.library import DTYPES, readable
from razorctl.ops.cpu.quantize import restored
from razorctl.ops.op import FewBitCopy


@kernels.register(
    op.linear_weight_grad,
    "cpu",
    lambda dy, copy, function: dy.dtype in DTYPES and len(dy) > 0 and readable(copy.scale),
)
def linear_weight_grad(dy: Tensor, copy: FewBitCopy, function: str | None) -> Tensor:
    return dy.T @ restored(copy, len(dy), dy.dtype, function)
