"""Kernels of ops.int8; the int8 products are torch's."""

import torch
from torch import Tensor

from razorctl.ops import int8 as op
from razorctl.ops import kernels
from razorctl.ops.chunks import ELEMENTS
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


def scaled_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Tensor:
    """See `ops.int8.scaled_gemm`; the product becomes the result in its own memory."""
    scales = (None if t is None else t.float().contiguous() for t in (a_scale, left, right))
    by, plus, along = scales
    columns = b_scale.float().contiguous()
    whole = dtype == torch.float32
    out = None if whole else a.new_empty(len(a), len(b), dtype=dtype)
    size = len(a) if whole else max(17, ELEMENTS // len(b))
    for start in range(0, len(a), size):
        rows = slice(start, start + size)
        product = op.cpu_gemm(a[rows], b)
        into = product.view(torch.float32) if out is None else out[rows]
        call(
            *("scaled", pointer(product), *product.shape),
            *(None if by is None else pointer(by[rows]), pointer(columns)),
            *(None if plus is None else pointer(plus[rows]), pointer(along)),
            *(pointer(into), DTYPES[dtype]),
        )
        if whole:
            return into
    assert out is not None
    return out


def takes_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> bool:
    """Whether `scaled_gemm` takes these arguments."""
    return a.numel() > 0 and b.numel() > 0 and dtype in DTYPES and takes(b_scale)


kernels.register(op.int8_rows, "cpu", int8_rows, takes)
kernels.register(op.int8_columns, "cpu", int8_columns, takes)
kernels.register(
    op.balance,
    "cpu",
    balance,
    lambda codes, scale: scale.dtype == torch.float32 and takes(scale) and codes.numel() > 0,
)
kernels.register(op.scaled_gemm, "cpu", scaled_gemm, takes_gemm, op.on_cpu)
