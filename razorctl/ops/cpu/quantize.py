"""Kernels of ops.quantize."""

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import quantize as op
from razorctl.ops.cpu.library import DTYPES, Copy, call, line_for, readable, single
from razorctl.ops.functions import NUMBERS
from razorctl.ops.op import FewBitCopy


def takes_quantize(x: Tensor, *_: object) -> bool:
    """Whether `quantize` takes these arguments."""
    return readable(x)


@kernels.register(op.quantize, "cpu", takes_quantize)
def quantize(
    x: Tensor,
    bits: int,
    tile_rows: int,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    seed: Tensor | None = None,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    copy = op.empty_copy(x, rows, columns, bits, tile_rows)
    given = x, DTYPES[x.dtype], x.stride(0), single(mean), single(rstd)
    reach = op.CLIP.get(bits, 0.0) if seed is None else 0.0
    ends = reach, op.LARGEST * torch.finfo(x.dtype).max
    line = line_for(copy[0], rows, columns, bits)
    call("quantize", *given, rows, columns, tile_rows, bits, *ends, seed, offset, line, *copy)
    return copy


@kernels.register(
    op.dequantize,
    "cpu",
    lambda copy, rows, dtype: rows > 0 and dtype in DTYPES and readable(copy.scale),
)
def dequantize(copy: FewBitCopy, rows: int, dtype: torch.dtype) -> Tensor:
    return restored(copy, rows, dtype, None)


def restored(copy: FewBitCopy, rows: int, dtype: torch.dtype, function: str | None) -> Tensor:
    """What `dequantize` returns, with `function` applied to it unless it is None."""
    values = copy.packed.new_empty(rows, copy.scale.shape[1], dtype=dtype)
    call("dequantize", Copy(copy, rows), NUMBERS[function], values, DTYPES[dtype])
    return values
