"""GEMMs of int8 copies for a backward pass; scales come from the largest magnitudes.

The dimension that a GEMM contracts cannot have scales, so each operand has one for each slice along
its other dimension. In dX = dy W these are the rows of dy and the columns of W. `int8_operand`
makes the operand that stands for x in dW = dy^T x.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops import kernels
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


def transposed(codes: Tensor) -> Tensor:
    """Codes [rows, columns] as [columns, rows], in the layout that the device's GEMMs want.

    GPUs want both operands contiguous along the dimension that a GEMM contracts.
    """
    return codes.t() if codes.device.type == "cpu" else codes.t().contiguous()


def empty_transposed(x: Tensor) -> Tensor:
    """The result of `transposed` for int8 codes of `x`, without values."""
    if x.device.type == "cpu":
        return x.new_empty(x.shape, dtype=torch.int8).t()
    return x.new_empty(x.shape[1], x.shape[0], dtype=torch.int8)


def int8_rows_reference(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `int8_rows`."""
    scale = _scale(x, 1)
    codes = (x * inverse(scale)).round().clamp(-LEVELS, LEVELS).to(torch.int8)
    return codes, scale, x.to(scale.dtype).sum(0)


@torch.library.custom_op("razorctl::int8_rows", mutates_args=())
def int8_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The int8 copy of `x` [rows, columns] with a scale for each row, and the sum of the rows.

    x is about scale * code, rounded to nearest; the largest magnitude of a row is exact. Returns
    codes in -127 to 127, scales [rows, 1] and the sum of x over its rows [columns], both in single
    precision at least.
    """
    codes = torch.empty_like(x, dtype=torch.int8, memory_format=torch.contiguous_format)
    dtype = torch.promote_types(x.dtype, torch.float32)
    scale = x.new_empty(len(x), 1, dtype=dtype)
    total = x.sum(0, dtype=dtype)
    if x.numel() == 0:
        return codes, scale.zero_(), total
    for rows in chunks(x):
        scale[rows] = _scale(x[rows], 1)
        codes[rows] = (x[rows] * inverse(scale[rows])).round_()
    return codes, scale, total


@int8_rows.register_fake
def empty_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `int8_rows` returns, without values."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    scale = x.new_empty(x.shape[0], 1, dtype=dtype)
    return x.new_empty(x.shape, dtype=torch.int8), scale, scale.new_empty(x.shape[1])


def int8_columns_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `int8_columns`."""
    codes, scale, _ = int8_rows_reference(x.t())
    return codes, scale.squeeze(1)


@torch.library.custom_op("razorctl::int8_columns", mutates_args=())
def int8_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """The int8 copy of `x` [rows, columns] with a scale for each column, transposed.

    Returns codes [columns, rows], laid out as `transposed` says, and scales [columns].
    """
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    if x.numel() == 0:
        return transposed(codes), x.new_zeros(
            x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32)
        )
    scale = _scale(x, 0)
    factor = inverse(scale)
    for rows in chunks(x):
        codes[rows] = (x[rows] * factor).round_()
    return transposed(codes), scale.squeeze(0)


@int8_columns.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    return empty_transposed(x), scale


def _shares(scale: Tensor) -> Tensor:
    """The square roots of the scales [rows, 1] over the largest of them, in (0, 1]."""
    return (scale * inverse(scale.max())).sqrt_()


def balance_reference(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """See `balance`."""
    share = _shares(scale)
    return (codes * share).round().to(torch.int8).t(), share * scale.max()


@torch.library.custom_op("razorctl::balance", mutates_args=())
def balance(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Takes half of the spread of the rows' scales back into the codes of `int8_rows`.

    codes: int8 [rows, columns]. scale: [rows, 1]. A GEMM that contracts rows must fold their scales
    into its other operand, where a row of a small scale would round to nothing. Returns int8 codes
    [columns, rows], laid out as `transposed` says, and scales [rows, 1], whose ratio to the largest
    is the square root of what it was; their products are as before, to half a scale.
    """
    balanced = torch.empty_like(codes)
    if not codes.numel():
        return transposed(balanced), scale.clone()
    share = _shares(scale)
    for rows in chunks(codes):
        balanced[rows] = codes[rows].to(share.dtype).mul_(share[rows]).round_()
    return transposed(balanced), share * scale.max()


@balance.register_fake
def _(codes: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return empty_transposed(codes), torch.empty_like(scale)


def scaled_gemm_reference(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Tensor:
    """See `scaled_gemm`."""
    product = (a.double() @ b.double().t()) * b_scale
    product = product if a_scale is None else product * a_scale
    if left is not None and right is not None:
        product += left.double().outer(right.double())
    return product.to(dtype)


@torch.library.custom_op("razorctl::scaled_gemm", mutates_args=())
def scaled_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Tensor:
    """a_scale (a b^T) b_scale + left right^T in `dtype` [m, n], for int8 a [m, k] and b [n, k].

    a_scale: [m, 1], None for 1. b_scale: [n]. left, right: [m] and [n], both None for nothing. The
    int8 product is exact: `torch._int_mm` computes it on devices with int8 GEMMs, and single
    precision on others, in parts of k that are short enough for exact sums.
    """
    gemm = cublas_gemm if has_int8_gemm(a.device) else exact_gemm
    return in_parts(gemm, a, b, a_scale, b_scale, dtype, left, right)


def on_cpu(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Tensor:
    return in_parts(cpu_gemm, a, b, a_scale, b_scale, dtype, left, right)


def cpu_gemm(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] times the transpose of b [n, k], int8, as int32 [m, n] on a CPU."""
    if not torch.cpu._is_vnni_supported():
        return exact_gemm(a, b)
    product: Tensor = torch._int_mm(a, b.t())
    return product


def in_parts(
    gemm: Callable[[Tensor, Tensor], Tensor],
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    left: Tensor | None,
    right: Tensor | None,
) -> Tensor:
    """`scaled_gemm` by `gemm`; makes the int32 product in parts of rows if `dtype` is narrower."""
    out = a.new_empty(len(a), len(b), dtype=dtype)
    if not (a.numel() and b.numel()):
        out.zero_()
        return out if left is None or right is None else out.addr_(left.to(dtype), right.to(dtype))
    size = len(a) if dtype == torch.float32 else max(17, ELEMENTS // len(b))
    for start in range(0, len(a), size):
        rows = slice(start, start + size)
        part = _scaled(gemm(a[rows], b), None if a_scale is None else a_scale[rows], b_scale)
        if left is not None and right is not None:
            part.addr_(left[rows].float(), right.float())
        if size == len(a) and dtype == torch.float32:
            return part
        out[rows] = part
    return out


def _scaled(product: Tensor, a_scale: Tensor | None, b_scale: Tensor) -> Tensor:
    """The int32 product times its scales, in single precision and in its own memory."""
    values = product.view(torch.float32)
    for rows in chunks(values):
        part = values[rows].copy_(product[rows]).mul_(b_scale)
        if a_scale is not None:
            part.mul_(a_scale[rows])
    return values


@scaled_gemm.register_fake
def _(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


def has_int8_gemm(device: torch.device) -> bool:
    """Whether an accelerator has `torch._int_mm` and tensor cores for it, as from Turing on.

    The meta device stands for a GPU that has them. GPUs without them take some tens of MiB more.
    """
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (7, 5)
    return device.type == "meta"


def cublas_gemm(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] times the transpose of b [n, k], int8, as int32 [m, n] by `torch._int_mm` on CUDA.

    cuBLASLt takes more than 16 rows, and multiples of 8 for the other sizes. Every card takes the
    layout in which both operands are contiguous along k.
    """
    (m, k), n = a.shape, len(b)
    if k % 8 or m < 17:
        a = F.pad(a, (0, -k % 8, 0, max(0, 17 - m)))
    if k % 8 or n % 8:
        b = F.pad(b, (0, -k % 8, 0, -n % 8))
    product: Tensor = torch._int_mm(a.contiguous(), b.contiguous().t())
    return product[:m, :n]


def exact_gemm(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] times the transpose of b [n, k], int8, as int32 [m, n], in single precision."""
    total = a.new_zeros(len(a), len(b), dtype=torch.int32)
    for start in range(0, a.shape[1], EXACT_TERMS):
        terms = slice(start, start + EXACT_TERMS)
        factor = b[:, terms].float().t()
        for rows in chunks(total):
            total[rows] += (a[rows, terms].float() @ factor).to(torch.int32)
    return total


kernels.describe(int8_rows, launches=2)
kernels.describe(int8_columns)
kernels.describe(balance)
kernels.describe(scaled_gemm, operations=lambda a, b, *scales: 2 * len(a) * len(b) * a.shape[1])
kernels.attach(__name__)
