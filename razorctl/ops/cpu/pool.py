"""Kernels of ops.pool, for images with channels first."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import pool as op
from razorctl.ops.cpu.library import DTYPES, call, line_for, pointer, takes
from razorctl.ops.packing import packed_bytes


def _pool(shape: torch.Size, outputs: torch.Size, geometry: list[int]) -> Any:
    """struct pool of pool.c."""
    return (ctypes.c_int64 * 12)(*shape[2:], *outputs[2:], *geometry)


def max_pool(x: Tensor, geometry: list[int], ceil_mode: bool) -> tuple[Tensor, Tensor]:
    """See `ops.pool.max_pool`."""
    shape, bits = op.outputs(x.shape, geometry, ceil_mode), op.bits_for(geometry)
    planes, outputs = shape[0] * shape[1], shape[2] * shape[3]
    y = x.new_empty(shape)
    packed = x.new_empty(packed_bytes(planes, outputs, bits), dtype=torch.uint8)
    line = line_for(packed, planes, outputs, bits)
    call(
        *("max_pool", pointer(x), DTYPES[x.dtype], planes, _pool(x.shape, shape, geometry)),
        *(bits, *(pointer(t) for t in (y, line, packed))),
    )
    return y, packed


def max_pool_grad(
    dy: Tensor, packed: Tensor, shape: list[int], geometry: list[int], ceil_mode: bool
) -> Tensor:
    """See `ops.pool.max_pool_grad`."""
    dx = dy.new_empty(shape)
    packed, pool = packed.contiguous(), _pool(dx.shape, dy.shape, geometry)
    call(
        *("max_pool_grad", pointer(packed), op.bits_for(geometry), shape[0] * shape[1], pool),
        *(pointer(dy), DTYPES[dy.dtype], pointer(dx)),
    )
    return dx


def takes_images(x: Tensor, *_: object) -> bool:
    """Whether the kernels take these images."""
    return x.is_contiguous() and takes(x)


kernels.register(op.max_pool, "cpu", max_pool, takes_images)
kernels.register(op.max_pool_grad, "cpu", max_pool_grad, takes_images)
