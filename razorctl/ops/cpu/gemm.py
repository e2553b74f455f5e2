"""Kernel of ops.gemm; the int8 products are torch's where the CPU has VNNI."""

import torch
from torch import Tensor

from razorctl.ops import gemm as op
from razorctl.ops import kernels
from razorctl.ops.chunks import ELEMENTS
from razorctl.ops.cpu.library import DTYPES, Codes, call, library, readable, single


def makes_products() -> bool:
    """Whether the kernel makes int8 products itself: with AVX2, where torch finds no VNNI."""
    found = None if torch.cpu._is_vnni_supported() else library()
    return found is not None and bool(found.razorctl_has_int8_gemm())


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
    """A product of torch's becomes the result in its own memory."""
    by, columns, plus, along = single(a_scale), single(b_scale), single(left), single(right)
    if makes_products():
        made = a.new_empty(len(a), len(b), dtype=dtype)
        call("int8_gemm", Codes(a), Codes(b), by, columns, plus, along, made, DTYPES[dtype])
        return made
    whole = dtype == torch.float32
    out = None if whole else a.new_empty(len(a), len(b), dtype=dtype)
    size = len(a) if whole else max(17, ELEMENTS // len(b))
    for start in range(0, len(a), size):
        rows = slice(start, start + size)
        product = op.cpu_gemm(a[rows], b)
        into = product.view(torch.float32) if out is None else out[rows]
        some_by, some_plus = (None if t is None else t[rows] for t in (by, plus))
        scales = some_by, columns, some_plus, along
        call("scaled", product, *product.shape, *scales, into, DTYPES[dtype])
        if whole:
            return into
    assert out is not None
    return out
