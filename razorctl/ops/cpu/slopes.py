"""Kernels of ops.slopes."""

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import slopes as op
from razorctl.ops.cpu.library import DTYPES, call, pointer, takes


def slope_bits(x: Tensor, low: float, high: float) -> Tensor:
    """See `ops.slopes.slope_bits`."""
    bits = x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)
    call("slope_bits", pointer(x), DTYPES[x.dtype], x.numel(), low, high, pointer(bits))
    return bits


def slope_grad(dy: Tensor, bits: Tensor, inside: float, outside: float) -> Tensor:
    """See `ops.slopes.slope_grad`."""
    dx, bits = dy.new_empty(dy.shape), bits.contiguous()
    shape = (1, dy.numel(), 0) if dy.is_contiguous() else (*dy.shape, dy.stride(0))
    call(
        *("slope_grad", pointer(dy), DTYPES[dy.dtype], *shape, pointer(bits)),
        *(inside, outside, pointer(dx)),
    )
    return dx


kernels.register(op.slope_bits, "cpu", slope_bits, lambda x, *others: takes(x))
kernels.register(op.slope_grad, "cpu", slope_grad, lambda dy, *others: takes(dy))
