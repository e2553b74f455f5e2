"""Kernels of ops.gemm; on CPUs with VNNI, PyTorch computes the int8 products."""

import torch
from torch import Tensor

from razorctl.ops import gemm as op
from razorctl.ops import kernels
from razorctl.ops.chunks import ELEMENTS
from razorctl.ops.cpu.library import DTYPES, Codes, call, library, readable, single


def makes_products() -> bool:
    """Whether the kernel computes int8 products itself: it has AVX2, and torch finds no VNNI."""
    kernels = None if op.has_vnni() else library()
    return kernels is not None and bool(kernels.razorctl_has_int8_gemm())


def takes_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    *_: object,
) -> bool:
    """Whether `scaled_gemm` takes these arguments."""
    return a.numel() > 0 and b.numel() > 0 and dtype in DTYPES and readable(b_scale)


@kernels.register(op.scaled_gemm, "cpu", takes_gemm, op.scaled_gemm_on_cpu)
def scaled_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Tensor:
    a_scale, b_scale, left, right = single(a_scale), b_scale.float(), single(left), single(right)
    b_scale = b_scale.contiguous()
    if makes_products():
        out = a.new_empty(len(a), len(b), dtype=dtype)
        call(
            "int8_gemm", a=Codes(a), b=Codes(b), a_scale=a_scale, b_scale=b_scale, left=left,
            right=right, out=out, dtype=DTYPES[dtype],
        )  # fmt: skip
        return out
    if dtype == torch.float32:
        product = op.cpu_gemm(a, b)
        out = product.view(torch.float32)
        _scale(product, a_scale, b_scale, left, right, out)
        return out
    out = a.new_empty(len(a), len(b), dtype=dtype)
    size = max(17, ELEMENTS // len(b))
    for start in range(0, len(a), size):
        rows = slice(start, start + size)
        some_scale, some_left = (None if t is None else t[rows] for t in (a_scale, left))
        _scale(op.cpu_gemm(a[rows], b), some_scale, b_scale, some_left, right, out[rows])
    return out


def _scale(
    product: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    out: Tensor,
) -> None:
    """Writes the scaled int32 product to `out`, which may be in the same memory."""
    call(
        "scaled", product=product, rows=len(product), columns=product.shape[1],
        a_scale=a_scale, b_scale=b_scale, left=left, right=right, out=out, dtype=DTYPES[out.dtype],
    )  # fmt: skip
