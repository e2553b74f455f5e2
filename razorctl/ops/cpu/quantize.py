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
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    packed, zero_point, scale = op.empty_copy(x, rows, columns, bits, tile_rows)
    call(
        "quantize", x=x, dtype=DTYPES[x.dtype], row_stride=x.stride(0), mean=single(mean),
        rstd=single(rstd), rows=rows, columns=columns, tile_rows=tile_rows, bits=bits,
        reach=op.CLIP.get(bits, 0.0) if seed is None else 0.0,
        limit=op.limit(x.dtype if rstd is None else torch.float32), seed=seed,
        line=line_for(packed, rows, columns, bits),
        packed=packed, zero_point=zero_point, scale=scale,
    )  # fmt: skip
    return packed, zero_point, scale


@kernels.register(
    op.dequantize,
    "cpu",
    lambda copy, rows, dtype: rows > 0 and dtype in DTYPES and readable(copy.scale),
)
def dequantize(copy: FewBitCopy, rows: int, dtype: torch.dtype) -> Tensor:
    return restored(copy, rows, dtype, None)


def restored(copy: FewBitCopy, rows: int, dtype: torch.dtype, function: str | None) -> Tensor:
    """f(x) for the x of a copy; `function`: f, a name in FUNCTIONS, None for x itself."""
    values = copy.packed.new_empty(rows, copy.scale.shape[1], dtype=dtype)
    call(
        "dequantize", copy=Copy(copy, rows), function=NUMBERS[function], values=values,
        dtype=DTYPES[dtype],
    )  # fmt: skip
    return values
