"""Kernels of ops.slopes."""

from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import slopes as op
from razorctl.ops.cpu.library import DTYPES, call, readable
from razorctl.ops.topk import empty_bits


@kernels.register(op.slope_bits, "cpu", lambda x, *_: readable(x))
def slope_bits(x: Tensor, low: float, high: float) -> Tensor:
    bits = empty_bits(x)
    call("slope_bits", x=x, dtype=DTYPES[x.dtype], n=x.numel(), low=low, high=high, bits=bits)
    return bits


@kernels.register(op.slope_grad, "cpu", lambda dy, *_: readable(dy))
def slope_grad(dy: Tensor, bits: Tensor, inside: float, outside: float) -> Tensor:
    dx = dy.new_empty(dy.shape)
    rows, columns, row_stride = 1, dy.numel(), 0
    if not dy.is_contiguous():
        (rows, columns), row_stride = dy.shape, dy.stride(0)
    call(
        "slope_grad", dy=dy, dtype=DTYPES[dy.dtype], rows=rows, columns=columns,
        row_stride=row_stride, bits=bits.contiguous(), inside=inside, outside=outside, dx=dx,
    )  # fmt: skip
    return dx
