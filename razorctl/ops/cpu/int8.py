"""Kernels of ops.int8."""

import torch
from torch import Tensor

from razorctl.ops import int8 as op
from razorctl.ops import kernels
from razorctl.ops.cpu.library import DTYPES, call, readable


@kernels.register(op.int8_rows, "cpu", readable)
def int8_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    codes = torch.empty(rows, columns, dtype=torch.int8)
    scale, total = torch.empty(rows, 1), torch.empty(columns)
    call("int8_rows", x, DTYPES[x.dtype], x.stride(0), rows, columns, codes, scale, total)
    return codes, scale, total


@kernels.register(
    op.int8_heads,
    "cpu",
    lambda q, k, v: readable(q, k, v) and q.stride() == k.stride() == v.stride(),
)
def int8_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    int8 = op.empty_heads(q, k, v)
    call("int8_heads", q, k, v, DTYPES[q.dtype], *q.stride()[:3], *q.shape, *int8)
    return int8


@kernels.register(op.int8_columns, "cpu", readable)
def int8_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(x.shape[1])
    call("int8_columns", x, DTYPES[x.dtype], x.stride(0), *x.shape, codes, scale)
    return codes.t(), scale


@kernels.register(
    op.balance,
    "cpu",
    lambda codes, scale: scale.dtype == torch.float32 and readable(scale) and codes.numel() > 0,
)
def balance(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    codes, scale = codes.contiguous(), scale.contiguous()
    balanced, shared = torch.empty_like(codes), torch.empty_like(scale)
    call("balance", codes, scale, *codes.shape, balanced, shared)
    return balanced.t(), shared
