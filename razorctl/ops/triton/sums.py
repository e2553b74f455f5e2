"""Sums of partial sums, which several kernels store for each of their programs.

total [columns] = sum over rows of partial [rows, columns], for up to three matrices.
"""

import triton.language as tl
from torch import Tensor

from razorctl.ops.triton.launch import cdiv, launchable
from razorctl.ops.triton.variants import Variant

ROWS, COLUMNS, WARPS = 128, 16, 4
STAGES = 3  # blocks of rows that are summed or being loaded


@launchable
def column_sums_kernel(
    partial, first, second, third, rows, columns,
    R: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program sums C columns of one of up to three matrices, always in the same order."""
    across = tl.cdiv(columns, C)
    matrix = tl.program_id(0) // across
    column = tl.program_id(0) % across * C + tl.arange(0, C)
    partial += matrix.to(tl.int64) * rows * columns
    sums = tl.zeros((R, C), tl.float32)
    for start in tl.range(0, rows, R, num_stages=STAGES):
        row = start + tl.arange(0, R)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        src = partial + row[:, None].to(tl.int64) * columns + column[None, :]
        sums += tl.load(src, mask=inside, other=0.0)
    total, there = tl.sum(sums, 0), column < columns
    if matrix == 0:
        tl.store(first + column, total, mask=there)
    if second is not None:
        if matrix == 1:
            tl.store(second + column, total, mask=there)
    if third is not None:
        if matrix == 2:
            tl.store(third + column, total, mask=there)


def column_sums(partial: Tensor) -> tuple[Tensor, ...]:
    """The sums over rows of up to three float32 matrices [matrices, rows, columns].

    Each [columns], in separate memory, as results of an op must be.
    """
    matrices, rows, columns = partial.shape
    totals = tuple(partial.new_empty(columns) for _ in range(matrices))
    first, second, third = (*totals, None, None)[:3]
    column_sums_kernel[(matrices * cdiv(columns, COLUMNS),)](
        partial, first, second, third, rows, columns,
        R=ROWS, C=COLUMNS, STAGES=STAGES, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return totals


def variant() -> Variant:
    """The variant of `column_sums`."""
    totals = dict.fromkeys(("first", "second", "third"), "*fp32")
    signature = {"partial": "*fp32", **totals, "rows": "i32", "columns": "i32"}
    sizes = {"R": ROWS, "C": COLUMNS, "STAGES": STAGES}
    return Variant(column_sums_kernel, signature, sizes, WARPS, 1, "column_sums", ("rows",))
