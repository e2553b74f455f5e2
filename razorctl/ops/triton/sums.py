"""Sums of partial sums, which several kernels leave for each of their programs."""

import torch
import triton.language as tl
from torch import Tensor

from razorctl.ops.triton.launch import cdiv, launchable
from razorctl.ops.triton.variants import Variant

ROWS, COLUMNS, WARPS = 64, 32, 4


@launchable
def column_sums_kernel(partial, total, rows, columns, R: tl.constexpr, C: tl.constexpr):
    """A program sums C columns of one of the matrices; always in the same order."""
    across = tl.cdiv(columns, C)
    matrix = tl.program_id(0) // across
    column = tl.program_id(0) % across * C + tl.arange(0, C)
    partial += matrix.to(tl.int64) * rows * columns
    found = tl.zeros((R, C), tl.float32)
    for first in range(0, rows, R):
        row = first + tl.arange(0, R)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        src = partial + row[:, None].to(tl.int64) * columns + column[None, :]
        found += tl.load(src, mask=inside, other=0.0)
    tl.store(total + matrix * columns + column, tl.sum(found, 0), mask=column < columns)


def column_sums(partial: Tensor) -> Tensor:
    """The sums over rows of float32 matrices [matrices, rows, columns], [matrices, columns]."""
    matrices, rows, columns = partial.shape
    total = torch.empty(matrices, columns, dtype=torch.float32, device=partial.device)
    column_sums_kernel[(matrices * cdiv(columns, COLUMNS),)](
        partial, total, rows, columns, R=ROWS, C=COLUMNS, num_warps=WARPS, num_stages=1
    )
    return total


def variant() -> Variant:
    """What `column_sums` compiles to."""
    signature = {"partial": "*fp32", "total": "*fp32", "rows": "i32", "columns": "i32"}
    sizes = {"R": ROWS, "C": COLUMNS}
    return Variant(column_sums_kernel, signature, sizes, WARPS, 1, "column_sums", ("rows",))
