"""Kernels of ops.int8."""

import torch
from torch import Tensor

from razorctl.ops import int8 as op
from razorctl.ops import kernels
from razorctl.ops.cpu.library import DTYPES, call, readable


@kernels.register(op.int8_rows, "cpu", readable)
def int8_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    codes, scale, total, largest = op.empty_rows(x)
    call(
        "int8_rows", x=x, dtype=DTYPES[x.dtype], row_stride=x.stride(0), rows=rows,
        columns=columns, codes=codes, scale=scale, total=total, largest=largest,
    )  # fmt: skip
    return codes, scale, total, largest


@kernels.register(
    op.int8_heads,
    "cpu",
    lambda q, k, v: readable(q, k, v) and q.stride() == k.stride() == v.stride(),
)
def int8_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes, scale, total, largest = op.empty_heads(q, k, v)
    batch, heads, tokens, width = q.shape
    call(
        "int8_heads", q=q, k=k, v=v, dtype=DTYPES[q.dtype], batch_stride=q.stride(0),
        head_stride=q.stride(1), token_stride=q.stride(2), batch=batch, heads=heads,
        tokens=tokens, width=width, codes=codes, scale=scale, total=total, largest=largest,
    )  # fmt: skip
    return codes, scale, total, largest


@kernels.register(
    op.int8_columns,
    "cpu",
    lambda x, factor=None, largest=None: (
        readable(x) and (factor is None or factor.dtype == torch.float32)
    ),
)
def int8_columns(
    x: Tensor, factor: Tensor | None = None, largest: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    codes, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(columns)
    call(
        "int8_columns", x=x, dtype=DTYPES[x.dtype], row_stride=x.stride(0),
        factor=None if factor is None else factor.contiguous(), largest=largest, rows=rows,
        columns=columns, codes=codes, scale=scale,
    )  # fmt: skip
    return codes.t(), scale
