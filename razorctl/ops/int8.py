"""int8 copies of matrices x [rows, columns], the operands of `gemm`.

scale = max |x| / 127 of each row or each column; code = round(x / scale).
"""

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops.chunks import chunks
from razorctl.ops.op import Fused, op

LEVELS = 127


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of scales and sums of `x`: single precision at least."""
    return torch.promote_types(x.dtype, torch.float32)


def scale_of(x: Tensor, dim: int) -> Tensor:
    """The scale of each slice of `x` along `dim`, which becomes 1; NaN for slices with NaN."""
    return _scale(torch.maximum(x.amax(dim, keepdim=True), -x.amin(dim, keepdim=True)).to(_wide(x)))


def _scale(largest: Tensor) -> Tensor:
    """The scale for a largest magnitude."""
    return largest.clamp(max=torch.finfo(largest.dtype).max) / LEVELS


def inverse(scale: Tensor) -> Tensor:
    """1 / scale; 0 if scale is 0 or 1 / scale is not finite."""
    return torch.where(scale > 0, 1 / scale, 0).nan_to_num(0, 0, 0)


def _rounded(x: Tensor) -> Tensor:
    """x / scale rounded to codes, in place; infinities become -127 or 127."""
    return x.round_().clamp_(-LEVELS, LEVELS)


def transposed(codes: Tensor) -> Tensor:
    """Codes [rows, columns] as [columns, rows], in the layout of the device's GEMMs.

    On GPUs both operands are contiguous along the contracted dimension.
    """
    return codes.t() if kernels.on_cpu(codes.device) else codes.t().contiguous()


def empty_transposed(x: Tensor) -> Tensor:
    """The result of `transposed` for int8 codes of `x`, without values."""
    if kernels.on_cpu(x.device):
        return x.new_empty(x.shape, dtype=torch.int8).t()
    return x.new_empty(x.shape[1], x.shape[0], dtype=torch.int8)


def empty_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of `int8_rows`, without values."""
    scale = x.new_empty(x.shape[0], 1, dtype=_wide(x))
    total, largest = (scale.new_empty(x.shape[1]) for _ in range(2))
    return x.new_empty(x.shape, dtype=torch.int8), scale, total, largest


def roots(row_scale: Tensor) -> Tensor:
    """The square roots of a gradient's row scales [rows, 1]; 0 for NaN.

    dW and db still become NaN, through the sum of the rows.
    """
    return row_scale.nan_to_num(0).sqrt_()


@op(empty=empty_rows, fused=Fused(launches=2, reduces=True))
def int8_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The int8 copy of `x` [rows, columns] with a scale per row, and statistics of columns.

    x is about scale * code, rounded to nearest; the largest magnitude of a row is exact. A row with
    a NaN has the scale NaN, so products are NaN too. Returns codes in -127 to 127 and, in single
    precision at least, scales [rows, 1], the sum of x over its rows [columns], and the largest
    magnitude of x / `roots(scale)` in each column [columns].
    """
    codes = torch.empty_like(x, dtype=torch.int8, memory_format=torch.contiguous_format)
    scale = x.new_empty(len(x), 1, dtype=_wide(x))
    total = x.sum(0, dtype=scale.dtype)
    largest = torch.zeros_like(total)
    if x.numel() == 0:
        return codes, scale.zero_(), total, largest
    for rows in chunks(x):
        scale[rows] = scale_of(x[rows], 1)
        by = inverse(scale[rows])
        codes[rows] = _rounded(x[rows] * by)
        by_roots = x[rows] * (by * roots(scale[rows]))
        largest = torch.maximum(largest, by_roots.abs_().amax(0))
    return codes, scale, total, largest


def adjoined(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Rows [batch * tokens, 3 * heads * columns] of q, k, v [batch, heads, tokens, columns]."""
    return torch.stack([t.transpose(1, 2) for t in (q, k, v)], 2).flatten(2).flatten(0, 1)


def empty_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The results of `int8_heads`, without values."""
    batch, heads, tokens, columns = q.shape
    return empty_rows(q.new_empty(batch * tokens, 3 * heads * columns))


@op(empty=empty_heads, fused=Fused(launches=2, reduces=True))
def int8_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`int8_rows` of q, k, v [batch, heads, tokens, columns], with all heads side by side.

    A row holds the heads of q, then of k, then of v, for one token.
    """
    return int8_rows.body(adjoined(q, k, v))


@op(
    empty=lambda x, *_: (empty_transposed(x), x.new_empty(x.shape[1], dtype=_wide(x))),
    fused=lambda x, *_: Fused(launches=2, again=x.nbytes, reduces=True),
)
def int8_columns(
    x: Tensor, factor: Tensor | None = None, largest: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The int8 copy of `factor` x with a scale for each column, transposed.

    Returns codes [columns, rows], in the layout of `transposed`, and scales [columns].

    Args:
        x: [rows, columns].
        factor: [rows, 1], None for 1.
        largest: The largest magnitude of each column of `factor` x, [columns]; None if not known.
    """
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    if x.numel() == 0:
        return transposed(codes), x.new_zeros(x.shape[1], dtype=_wide(x))
    x = x if factor is None else x * factor
    scale = scale_of(x, 0) if largest is None else _scale(largest)
    by = inverse(scale)
    for rows in chunks(x):
        codes[rows] = _rounded(x[rows] * by)
    return transposed(codes), scale.squeeze(0)
