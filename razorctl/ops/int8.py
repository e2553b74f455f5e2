"""GEMMs of int8 copies for a backward pass; scales come from the largest magnitudes.

The dimension that a GEMM contracts cannot have scales, so each operand has one for each slice along
its other dimension. In dX = dy W these are the rows of dy and the columns of W. `int8_operand`
makes the operand that stands for x in dW = dy^T x.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops.chunks import ELEMENTS, chunks

LEVELS = 127
# Single precision holds the sum of so many products of codes exactly.
EXACT_TERMS = 2**24 // (LEVELS + 1) ** 2


def _scale(x: Tensor, dim: int) -> Tensor:
    """The scale of each slice of `x` along `dim`, whose size becomes 1."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    limit = torch.finfo(dtype).max
    largest = torch.maximum(x.amax(dim, keepdim=True), -x.amin(dim, keepdim=True))
    return largest.to(dtype).nan_to_num(0, limit) / LEVELS


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where scale is 0 or 1 / scale is not finite."""
    return torch.where(scale > 0, 1 / scale, 0).nan_to_num(0, 0, 0)


def to_int8_reference(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """See `to_int8`."""
    scale = _scale(x, dim)
    return (x * inverse(scale)).round().clamp(-LEVELS, LEVELS).to(torch.int8), scale


@torch.library.custom_op("razorctl::to_int8", mutates_args=())
def to_int8(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The int8 copy of `x` [rows, columns] with a scale for each slice along `dim`.

    x is about scale * code, rounded to nearest; the largest magnitude of a slice is exact. Returns
    codes in -127 to 127 and scales, in single precision at least, with size 1 at `dim`.
    """
    codes = torch.empty_like(x, dtype=torch.int8, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        size = [1 if i == dim else n for i, n in enumerate(x.shape)]
        return codes, x.new_zeros(size, dtype=torch.promote_types(x.dtype, torch.float32))
    if dim == 1:  # a part at a time, while it is in cache
        scale = x.new_empty(len(x), 1, dtype=torch.promote_types(x.dtype, torch.float32))
        for (rows,) in chunks(x):
            scale[rows] = _scale(x[rows], dim)
            codes[rows] = (x[rows] * inverse(scale[rows])).round_()
        return codes, scale
    scale = _scale(x, dim)
    factor = inverse(scale)
    for (rows,) in chunks(x):
        codes[rows] = (x[rows] * factor).round_()
    return codes, scale


@to_int8.register_fake
def _(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    size = [1 if i == dim else n for i, n in enumerate(x.shape)]
    scale = x.new_empty(size, dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(x.shape, dtype=torch.int8), scale


def _shares(scale: Tensor) -> Tensor:
    """The square roots of the scales [rows, 1] over the largest of them, in (0, 1]."""
    return (scale * inverse(scale.max())).sqrt_()


def balance_reference(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """See `balance`."""
    share = _shares(scale)
    return (codes * share).round().to(torch.int8), share * scale.max()


@torch.library.custom_op("razorctl::balance", mutates_args=())
def balance(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Takes half of the spread of the rows' scales back into the codes of `to_int8`.

    codes: int8 [rows, columns]. scale: [rows, 1]. A GEMM that contracts rows must fold their scales
    into its other operand, where a row of a small scale would round to nothing. Returns int8 codes
    and scales [rows, 1], whose ratio to the largest is the square root of what it was; their
    products are as before, to half a scale.
    """
    balanced = torch.empty_like(codes)
    if not codes.numel():
        return balanced, scale.clone()
    share = _shares(scale)
    for (rows,) in chunks(codes):
        balanced[rows] = codes[rows].to(share.dtype).mul_(share[rows]).round_()
    return balanced, share * scale.max()


@balance.register_fake
def _(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(codes), torch.empty_like(scale)


def scaled_gemm_reference(
    a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """See `scaled_gemm`."""
    product = (a.double() @ b.double()).to(b_scale.dtype)
    return (product * b_scale if a_scale is None else product * a_scale * b_scale).to(dtype)


@torch.library.custom_op("razorctl::scaled_gemm", mutates_args=())
def scaled_gemm(
    a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """a_scale (a b) b_scale in `dtype`, for int8 a [m, k], b [k, n] and scales [m, 1], [1, n].

    a_scale: None for 1. The int8 product is exact: `torch._int_mm` computes it on devices with int8
    GEMMs, and single precision on others, in parts of k that are short enough for exact sums.
    """
    return _in_parts(
        cublas_gemm if has_int8_gemm(a.device) else exact_gemm, a, b, a_scale, b_scale, dtype
    )


@scaled_gemm.register_kernel("cpu")
def _(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    gemm = torch._int_mm if torch.cpu._is_vnni_supported() else exact_gemm
    return _in_parts(gemm, a, b, a_scale, b_scale, dtype)


def _in_parts(
    gemm: Callable[[Tensor, Tensor], Tensor],
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """`scaled_gemm` by `gemm`; makes the int32 product in parts of rows if `dtype` is narrower."""
    if not (a.numel() and b.numel()):
        return a.new_zeros(a.shape[0], b.shape[1], dtype=dtype)
    if dtype == torch.float32:
        return _scaled(gemm(a, b), a_scale, b_scale)
    out = a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
    most = max(17, ELEMENTS // b.shape[1])
    for start in range(0, len(a), most):
        rows = slice(start, start + most)
        part = None if a_scale is None else a_scale[rows]
        out[rows] = _scaled(gemm(a[rows], b), part, b_scale)
    return out


def _scaled(product: Tensor, a_scale: Tensor | None, b_scale: Tensor) -> Tensor:
    """The int32 product times its scales, in single precision and in its own memory."""
    values = product.view(torch.float32)
    for (rows,) in chunks(values):
        part = values[rows].copy_(product[rows]).mul_(b_scale)
        if a_scale is not None:
            part.mul_(a_scale[rows])
    return values


@scaled_gemm.register_fake
def _(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


def has_int8_gemm(device: torch.device) -> bool:
    """Whether an accelerator has `torch._int_mm` and tensor cores for it, as from Turing on.

    The meta device stands for a GPU that has them. GPUs without them take some tens of MiB more.
    """
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (7, 5)
    return device.type == "meta"


def cublas_gemm(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] times b [k, n], int8, as int32 [m, n] by `torch._int_mm` on CUDA.

    cuBLASLt takes more than 16 rows, and multiples of 8 for the other sizes. Every card takes the
    layout in which both operands are contiguous along k.
    """
    (m, k), n = a.shape, b.shape[1]
    if k % 8 or m < 17:
        a = F.pad(a, (0, -k % 8, 0, max(0, 17 - m)))
    b = b.t().contiguous()
    if k % 8 or n % 8:
        b = F.pad(b, (0, -k % 8, 0, -n % 8))
    product: Tensor = torch._int_mm(a.contiguous(), b.t())
    return product[:m, :n]


def exact_gemm(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] times b [k, n], int8, as int32 [m, n], computed in single precision."""
    total = a.new_zeros(a.shape[0], b.shape[1], dtype=torch.int32)
    for start in range(0, a.shape[1], EXACT_TERMS):
        terms = slice(start, start + EXACT_TERMS)
        factor = b[terms].float()
        for (rows,) in chunks(total):
            total[rows] += (a[rows, terms].float() @ factor).to(torch.int32)
    return total
