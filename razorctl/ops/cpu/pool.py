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
    call(
        "max_pool", x=x, dtype=DTYPES[x.dtype], planes=planes, p=_pool(x.shape, shape, geometry),
        bits=bits, y=y, line=line_for(packed, planes, outputs, bits), packed=packed,
    )  # fmt: skip
    return y, packed


@kernels.register(op.max_pool_grad, "cpu", takes_images)
def max_pool_grad(
    dy: Tensor, packed: Tensor, shape: list[int], geometry: list[int], ceil_mode: bool
) -> Tensor:
    dx = dy.new_empty(shape)
    call(
        "max_pool_grad", packed=packed.contiguous(), bits=op.bits_for(geometry),
        planes=shape[0] * shape[1], p=_pool(dx.shape, dy.shape, geometry),
        dy=dy, dtype=DTYPES[dy.dtype], dx=dx,
    )  # fmt: skip
    return dx
