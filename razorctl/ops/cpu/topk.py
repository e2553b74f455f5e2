"""Kernels of ops.topk."""

from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import topk as op
from razorctl.ops.cpu.library import DTYPES, call, takes


@kernels.register(op.topk_pack, "cpu", lambda x, k: takes(x), op.on_cpu)
def topk_pack(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    values, bitmap = x.new_empty(k), op.empty_bits(x)
    call("topk_pack", x, DTYPES[x.dtype], x.numel(), k, values, bitmap)
    return values, bitmap


@kernels.register(op.topk_unpack, "cpu", lambda values, *_: takes(values), op.unpack_at_once)
def topk_unpack(values: Tensor, bitmap: Tensor, shape: list[int]) -> Tensor:
    values, bitmap = values.contiguous(), bitmap.contiguous()
    dense = values.new_empty(shape)
    call("topk_unpack", values, bitmap, dense.numel(), dense.element_size(), dense)
    return dense
