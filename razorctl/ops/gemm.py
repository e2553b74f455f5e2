"""The GEMM of two int8 operands with the scales of both.

out [m, n] = a_scale (a b^T) b_scale + left right^T, for a [m, k], b [n, k], a_scale [m, 1],
b_scale [n], left [m], right [n].

The contracted dimension cannot have scales. So each operand has one scale per slice along its other
dimension: in dX = dy W, per row of dy and per column of W. `int8_operand` computes the operand x in
dW = dy^T x.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops.chunks import chunks
from razorctl.ops.int8 import LEVELS, int8_rows
from razorctl.ops.op import Fused, op

PART = 2**24  # elements of the int32 product in memory at a time; smaller parts cost launches
# The most terms for which a sum of products of codes is exact in single precision.
EXACT_TERMS = 2**24 // (LEVELS + 1) ** 2
COPY_ROWS = 128  # rows of a tile in an 8-bit copy of a result; a program on a card computes as many


@op(
    empty=lambda a, b, a_scale, b_scale, dtype, *_: a.new_empty(
        a.shape[0], b.shape[0], dtype=dtype
    ),
    fused=lambda a, b, *_: Fused(
        operations=2 * len(a) * len(b) * a.shape[1], rows=part_rows(len(b))
    ),
)
def scaled_gemm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Tensor:
    """a_scale (a b^T) b_scale + left right^T, [m, n].

    The int8 product is exact. On devices with int8 GEMMs `torch._int_mm` computes it, on CPUs with
    AVX2 but not VNNI a C kernel, and elsewhere GEMMs in single precision, in parts of k that are
    short enough for exact sums.

    Args:
        a: int8 [m, k].
        b: int8 [n, k].
        a_scale: [m, 1], None for 1.
        b_scale: [n].
        dtype: The dtype of the result.
        left: [m], None for 0.
        right: [n], None if left is None.
    """
    gemm = cublas_gemm if has_int8_gemm(a.device) else exact_gemm
    return in_parts(gemm, a, b, a_scale, b_scale, dtype, left, right)


def scaled_gemm_on_cpu(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor | None,
    b_scale: Tensor,
    dtype: torch.dtype,
    left: Tensor | None = None,
    right: Tensor | None = None,
) -> Tensor:
    return in_parts(cpu_gemm, a, b, a_scale, b_scale, dtype, left, right)


def has_vnni() -> bool:
    """Whether the CPU multiplies int8 in AVX-512, as PyTorch's kernels need it."""
    return bool(torch.cpu.get_capabilities().get("avx512_vnni"))


def cpu_gemm(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] times the transpose of b [n, k], int8, as int32 [m, n] on a CPU."""
    if not has_vnni():
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
    """`scaled_gemm` by `gemm`, with an int32 product in parts if `dtype` is narrower."""
    out = a.new_empty(len(a), len(b), dtype=dtype)
    if not (a.numel() and b.numel()):
        out.zero_()
        return out if left is None or right is None else out.addr_(left.to(dtype), right.to(dtype))
    size = len(a) if dtype == torch.float32 else part_rows(len(b))
    for start in range(0, len(a), size):
        rows = slice(start, start + size)
        part = _scaled(gemm(a[rows], b), None if a_scale is None else a_scale[rows], b_scale)
        if left is not None and right is not None:
            part.addr_(left[rows].float(), right.float())
        if size == len(a) and dtype == torch.float32:
            return part
        out[rows] = part
    return out


def part_rows(columns: int, tile_rows: int = 1) -> int:
    """Rows of an int32 product in memory at a time, in whole tiles; cuBLASLt needs more than 16."""
    return max(17, tile_rows, PART // columns // tile_rows * tile_rows)


def _scaled(product: Tensor, a_scale: Tensor | None, b_scale: Tensor) -> Tensor:
    """The int32 product times its scales, in single precision, in the same memory."""
    values = product.view(torch.float32)
    for rows in chunks(values):
        part = values[rows].copy_(product[rows]).mul_(b_scale)
        if a_scale is not None:
            part.mul_(a_scale[rows])
    return values


def has_int8_gemm(device: torch.device) -> bool:
    """Whether an accelerator has `torch._int_mm` with tensor cores, as from Turing on.

    The meta device stands for such a GPU; other GPUs need some tens of MiB more.
    """
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (7, 5)
    return device.type == "meta"


def cublas_gemm(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k] times the transpose of b [n, k], int8, as int32 [m, n] by `torch._int_mm` on CUDA.

    cuBLASLt needs more than 16 rows, and multiples of 8 for the other sizes. Every card supports
    operands that are contiguous along k.
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


def int8_linear(
    x: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """x W^T + b, [rows, out] in `dtype`, with both operands in int8.

    Args:
        x: the result of `int8_rows` for x [rows, in]; without the sum if x has no infinities.
        weight: [out, in].
        bias: [out], or None.
        dtype: of the result.
    """
    codes, scale, total, _ = x
    outputs, out_scale, out_total, _ = int8_rows(weight)
    out_scale = out_scale.squeeze(1)
    left, right = None, None if bias is None else bias.to(out_scale.dtype)
    if total is not None:  # codes cannot be infinite, but sums carry infinities on, as in stock
        right = out_scale.new_zeros(len(out_scale)) if right is None else right
        right = right.add(total.dot(out_total), alpha=0)
    if right is not None:
        left = torch.ones_like(scale).squeeze(1)
    return scaled_gemm(codes, outputs, scale, out_scale, dtype, left, right)
