"""Kernels of ops.quantize."""

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops import quantize as op
from razorctl.ops.cpu.library import (
    DTYPES,
    FUNCTIONS,
    Copy,
    call,
    empty_copy,
    line_for,
    pointer,
    takes,
)


def quantize(
    x: Tensor,
    bits: int,
    tile_rows: int,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    seed: Tensor | None = None,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.quantize.quantize`."""
    rows, columns = x.shape
    packed, zero_point, scale = empty_copy(x, rows, columns, bits, tile_rows)
    mean, rstd = (None if t is None else t.float().contiguous() for t in (mean, rstd))
    line = line_for(packed, rows, columns, bits)
    reach = op.CLIP.get(bits, 0.0) if seed is None else 0.0
    call(
        *("quantize", pointer(x), DTYPES[x.dtype], x.stride(0), pointer(mean), pointer(rstd)),
        *(rows, columns, tile_rows, bits, reach, op.LARGEST * torch.finfo(x.dtype).max),
        *(pointer(seed), offset, pointer(line)),
        *(pointer(t) for t in (packed, zero_point, scale)),
    )
    return packed, zero_point, scale


def takes_quantize(x: Tensor, *others: object) -> bool:
    """Whether `quantize` takes these arguments."""
    return takes(x)


def dequantize(
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    rows: int,
    tile_rows: int,
    dtype: torch.dtype,
    function: str | None = None,
) -> Tensor:
    """See `ops.quantize.dequantize`; with a `function`, its values at those."""
    copy = Copy(packed, zero_point, scale, bias, bits, rows, tile_rows)
    values = packed.new_empty(rows, scale.shape[1], dtype=dtype)
    call("dequantize", copy, FUNCTIONS[function], pointer(values), DTYPES[dtype])
    return values


def takes_dequantize(
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    rows: int,
    tile_rows: int,
    dtype: torch.dtype,
) -> bool:
    """Whether `dequantize` takes these arguments."""
    return rows > 0 and dtype in DTYPES and takes(scale)


kernels.register(op.quantize, "cpu", quantize, takes_quantize)
kernels.register(op.dequantize, "cpu", dequantize, takes_dequantize)
