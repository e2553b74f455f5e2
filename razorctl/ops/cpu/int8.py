"""Kernels of ops.int8."""

import torch
from torch import Tensor

from razorctl.ops import int8 as op
from razorctl.ops import kernels
from razorctl.ops.cpu.library import DTYPES, call, pointer, takes


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.int8.int8_rows`."""
    rows, columns = x.shape
    codes = torch.empty(x.shape, dtype=torch.int8)
    scale, total = torch.empty(rows, 1), torch.empty(columns)
    call(
        *("int8_rows", pointer(x), DTYPES[x.dtype], x.stride(0), rows, columns),
        *(pointer(codes), pointer(scale), pointer(total)),
    )
    return codes, scale, total


def int8_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `ops.int8.int8_heads`."""
    batch, heads, tokens, columns = q.shape
    codes, scale, total = op.empty_heads(q, k, v)
    strides, shape = q.stride()[:3], (batch, heads, tokens, columns)
    results = pointer(codes), pointer(scale), pointer(total)
    parts = pointer(q), pointer(k), pointer(v)
    call("int8_heads", *parts, DTYPES[q.dtype], *strides, *shape, *results)
    return codes, scale, total


def int8_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `ops.int8.int8_columns`."""
    rows, columns = x.shape
    codes, scale = torch.empty(x.shape, dtype=torch.int8), torch.empty(columns)
    call(
        *("int8_columns", pointer(x), DTYPES[x.dtype], x.stride(0), rows, columns),
        *(pointer(codes), pointer(scale)),
    )
    return codes.t(), scale


def balance(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """See `ops.int8.balance`."""
    codes, scale = codes.contiguous(), scale.contiguous()
    balanced, balanced_scale = torch.empty_like(codes), torch.empty_like(scale)
    call(
        *("balance", pointer(codes), pointer(scale), *codes.shape),
        *(pointer(balanced), pointer(balanced_scale)),
    )
    return balanced.t(), balanced_scale


kernels.register(op.int8_rows, "cpu", int8_rows, takes)
kernels.register(
    op.int8_heads,
    "cpu",
    int8_heads,
    lambda q, k, v: takes(q, k, v) and q.stride() == k.stride() == v.stride(),
)
kernels.register(op.int8_columns, "cpu", int8_columns, takes)
kernels.register(
    op.balance,
    "cpu",
    balance,
    lambda codes, scale: scale.dtype == torch.float32 and takes(scale) and codes.numel() > 0,
)
