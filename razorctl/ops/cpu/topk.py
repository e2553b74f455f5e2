"""Kernels of ops.topk."""

from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import topk as op
from razorctl.ops.cpu.library import DTYPES, call, readable


@kernels.register(op.topk_pack, "cpu", lambda x, k: readable(x), op.topk_pack_on_cpu)
def topk_pack(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    values, bitmap = x.new_empty(k), op.empty_bits(x)
    call("topk_pack", x=x, dtype=DTYPES[x.dtype], n=x.numel(), k=k, values=values, bitmap=bitmap)
    return values, bitmap


@kernels.register(op.topk_unpack, "cpu", lambda values, *_: readable(values), op.topk_unpack_on_cpu)
def topk_unpack(values: Tensor, bitmap: Tensor, shape: list[int]) -> Tensor:
    values, bitmap = values.contiguous(), bitmap.contiguous()
    dense = values.new_empty(shape)
    call(
        "topk_unpack", values=values, bitmap=bitmap, n=dense.numel(), size=dense.element_size(),
        x=dense,
    )  # fmt: skip
    return dense
