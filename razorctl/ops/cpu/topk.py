"""Kernels of ops.topk."""

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import topk as op
from razorctl.ops.cpu.library import DTYPES, call, pointer, takes


def topk_pack(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See `ops.topk.topk_pack`."""
    x = x.contiguous()
    values = x.new_empty(k)
    bitmap = x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)
    call(
        *("topk_pack", pointer(x), DTYPES[x.dtype], x.numel(), k),
        *(pointer(values), pointer(bitmap)),
    )
    return values, bitmap


def topk_unpack(values: Tensor, bitmap: Tensor, shape: list[int]) -> Tensor:
    """See `ops.topk.topk_unpack`."""
    values, bitmap = values.contiguous(), bitmap.contiguous()
    dense = values.new_empty(shape)
    call(
        *("topk_unpack", pointer(values), pointer(bitmap), dense.numel(), dense.element_size()),
        pointer(dense),
    )
    return dense


kernels.register(op.topk_pack, "cpu", topk_pack, lambda x, k: takes(x), op.on_cpu)
kernels.register(
    op.topk_unpack,
    "cpu",
    topk_unpack,
    lambda values, *others: takes(values),
    op.topk_unpack_reference,
)
