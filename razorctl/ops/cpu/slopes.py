"""Kernels of ops.slopes."""

from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import slopes as op
from razorctl.ops.cpu.library import DTYPES, call, readable
from razorctl.ops.topk import empty_bits


@kernels.register(op.slope_bits, "cpu", lambda x, *_: readable(x))
def slope_bits(x: Tensor, low: float, high: float) -> Tensor:
    bits = empty_bits(x)
    call("slope_bits", x, DTYPES[x.dtype], x.numel(), low, high, bits)
    return bits


@kernels.register(op.slope_grad, "cpu", lambda dy, *_: readable(dy))
def slope_grad(dy: Tensor, bits: Tensor, inside: float, outside: float) -> Tensor:
    dx, bits = dy.new_empty(dy.shape), bits.contiguous()
    shape = (1, dy.numel(), 0) if dy.is_contiguous() else (*dy.shape, dy.stride(0))
    call("slope_grad", dy, DTYPES[dy.dtype], *shape, bits, inside, outside, dx)
    return dx
