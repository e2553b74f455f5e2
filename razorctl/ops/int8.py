"""GEMMs of int8 copies, for a backward pass: their scales are the operands' largest values.

Contracted dimensions cannot have scales of their own, so each operand has one for each slice along
the other: dW = dy^T x for each output and each column, dX = dy W for each token and each column.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops.chunks import ELEMENTS, chunks

LEVELS = 127
# Sums of so many products of codes are whole numbers that single precision holds exactly.
EXACT_TERMS = 2**24 // (LEVELS + 1) ** 2


def _scale(x: Tensor, dim: int) -> Tensor:
    """The scale of each slice of `x` along `dim`, whose size becomes 1."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    limit = torch.finfo(dtype).max
    largest = torch.maximum(x.amax(dim, keepdim=True), -x.amin(dim, keepdim=True))
    return largest.to(dtype).nan_to_num(0, limit) / LEVELS


def inverse(scale: Tensor) -> Tensor:
    """1 / scale, and 0 where that is none."""
    return torch.where(scale > 0, 1 / scale, 0).nan_to_num(0, 0, 0)


def to_int8_reference(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """See `to_int8`."""
    scale = _scale(x, dim)
    return (x * inverse(scale)).round().clamp(-LEVELS, LEVELS).to(torch.int8), scale


@torch.library.custom_op("razorctl::to_int8", mutates_args=())
def to_int8(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The int8 copy of `x` [rows, columns] with a scale for each slice along `dim`.

    x is about scale * code, to the nearest; the largest of a slice is exact. Returns codes in -127
    to 127 and scales, in single precision at least, with size 1 at `dim`.
    """
    codes = torch.empty_like(x, dtype=torch.int8, memory_format=torch.contiguous_format)
    if x.numel() == 0:
        kept = [1 if i == dim else n for i, n in enumerate(x.shape)]
        return codes, x.new_zeros(kept, dtype=torch.promote_types(x.dtype, torch.float32))
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
    kept = [1 if i == dim else n for i, n in enumerate(x.shape)]
    scale = x.new_empty(kept, dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(x.shape, dtype=torch.int8), scale


def scaled_gemm_reference(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """See `scaled_gemm`."""
    return ((a.double() @ b.double()).to(a_scale.dtype) * a_scale * b_scale).to(dtype)


@torch.library.custom_op("razorctl::scaled_gemm", mutates_args=())
def scaled_gemm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """a_scale (a b) b_scale in `dtype`, for int8 a [m, k], b [k, n] and scales [m, 1], [1, n].

    The int8 product is exact: by `torch._int_mm` where the device has int8 GEMMs, anywhere else in
    single precision over parts of k that it can sum exactly.
    """
    gemm = int8_gemm if has_int8_gemm(a.device) else exact_gemm
    if a.device.type != "cpu":  # the layout that every int8 GEMM of cuBLASLt takes
        b = b.t().contiguous().t()
    if dtype == torch.float32:
        return _scaled(gemm(a, b), a_scale, b_scale)
    out = a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
    step = max(17, ELEMENTS // max(1, b.shape[1]))
    for start in range(0, len(a), step):
        rows = slice(start, start + step)
        out[rows] = _scaled(gemm(a[rows], b), a_scale[rows], b_scale)
    return out


def _scaled(product: Tensor, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """The int32 product times its scales, in single precision and in its own memory."""
    values = product.view(torch.float32)
    for (rows,) in chunks(values):
        values[rows].copy_(product[rows]).mul_(b_scale).mul_(a_scale[rows])
    return values


@scaled_gemm.register_fake
def _(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


def has_int8_gemm(device: torch.device) -> bool:
    """Whether `torch._int_mm` is there and fast: tensor cores from Turing on, VNNI on a CPU.

    The meta device stands for a GPU that has it; others take some tens of MiB more.
    """
    if device.type == "meta":
        return True
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (7, 5)
    vnni: bool = device.type == "cpu" and torch.cpu._is_vnni_supported()
    return vnni


def int8_gemm(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] times b [k, n], int8, as int32 [m, n] by `torch._int_mm`."""
    (m, k), n = a.shape, b.shape[1]
    if not (m and k and n):
        return a.new_zeros(m, n, dtype=torch.int32)
    if a.device.type != "cpu":  # cuBLASLt: more than 16 rows, the other sizes multiples of 8
        if k % 8 or m < 17:
            a = F.pad(a, (0, -k % 8, 0, max(0, 17 - m)))
        a = a.contiguous()
        if k % 8 or n % 8:
            b = F.pad(b.t(), (0, -k % 8, 0, -n % 8)).t()
    product: Tensor = torch._int_mm(a, b)
    return product[:m, :n]


def exact_gemm(a: Tensor, b: Tensor) -> Tensor:
    """The same numbers as `int8_gemm`, where there is none."""
    total = a.new_zeros(a.shape[0], b.shape[1], dtype=torch.int32)
    for start in range(0, a.shape[1], EXACT_TERMS):
        terms = slice(start, start + EXACT_TERMS)
        factor = b[terms].float()
        for (rows,) in chunks(total):
            total[rows] += (a[rows, terms].float() @ factor).to(torch.int32)
    return total
