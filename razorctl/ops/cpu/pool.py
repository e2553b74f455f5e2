"""Kernels of ops.pool, for images with channels first."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import pool as op
from razorctl.ops.cpu.library import DTYPES, call, line_for, readable
from razorctl.ops.packing import packed_bytes


def _pool(shape: torch.Size, outputs: torch.Size, geometry: list[int]) -> Any:
    """struct pool of pool.c."""
    return (ctypes.c_int64 * 12)(*shape[2:], *outputs[2:], *geometry)


def takes_images(x: Tensor, *_: object) -> bool:
    """Whether the kernels take these images."""
    return x.is_contiguous() and readable(x)


@kernels.register(op.max_pool, "cpu", takes_images)
def max_pool(x: Tensor, geometry: list[int], ceil_mode: bool) -> tuple[Tensor, Tensor]:
    shape, bits = op.outputs(x.shape, geometry, ceil_mode), op.bits_for(geometry)
    planes, outputs = shape[0] * shape[1], shape[2] * shape[3]
    y = x.new_empty(shape)
    packed = x.new_empty(packed_bytes(planes, outputs, bits), dtype=torch.uint8)
    line, pool = line_for(packed, planes, outputs, bits), _pool(x.shape, shape, geometry)
    call("max_pool", x, DTYPES[x.dtype], planes, pool, bits, y, line, packed)
    return y, packed


@kernels.register(op.max_pool_grad, "cpu", takes_images)
def max_pool_grad(
    dy: Tensor, packed: Tensor, shape: list[int], geometry: list[int], ceil_mode: bool
) -> Tensor:
    dx, packed, planes = dy.new_empty(shape), packed.contiguous(), shape[0] * shape[1]
    bits, pool = op.bits_for(geometry), _pool(dx.shape, dy.shape, geometry)
    call("max_pool_grad", packed, bits, planes, pool, dy, DTYPES[dy.dtype], dx)
    return dx
