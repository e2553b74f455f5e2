"""Reductions of the sums and largest magnitudes that each program of a kernel stores.

total [columns] = sum over rows of partial [rows, columns], for up to three matrices, and largest
[columns] over rows of one more.
"""

import triton.language as tl
from torch import Tensor

from razorctl.ops.triton.launch import cdiv, launchable
from razorctl.ops.triton.numbers import magnitude
from razorctl.ops.triton.variants import Variant

ROWS, COLUMNS, WARPS = 128, 16, 4
STAGES = 3  # blocks of rows that are summed or being loaded


@launchable
def column_sums_kernel(
    partial, first, second, third, largest, rows, columns,
    R: tl.constexpr, C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has C columns of one of up to four matrices, which it sums in the same order.

    largest: of the last matrix, unless it is None; NaN is the largest.
    """
    across = tl.cdiv(columns, C)
    matrix = tl.program_id(0) // across
    column = tl.program_id(0) % across * C + tl.arange(0, C)
    partial += matrix.to(tl.int64) * rows * columns
    sums, most = tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.int32)
    for start in tl.range(0, rows, R, num_stages=STAGES):
        row = start + tl.arange(0, R)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        src = partial + row[:, None].to(tl.int64) * columns + column[None, :]
        values = tl.load(src, mask=inside, other=0.0)
        sums += values
        most = tl.maximum(most, magnitude(values))
    total, there = tl.sum(sums, 0), column < columns
    if matrix == 0:
        tl.store(first + column, total, mask=there)
    if second is not None:
        if matrix == 1:
            tl.store(second + column, total, mask=there)
    if third is not None:
        if matrix == 2:
            tl.store(third + column, total, mask=there)
    if largest is not None:
        if matrix == tl.num_programs(0) // across - 1:
            bits = tl.max(most, 0).to(tl.float32, bitcast=True)
            tl.store(largest + column, bits, mask=there)


def column_sums(partial: Tensor, largest: bool = False) -> tuple[Tensor, ...]:
    """The sums over rows of up to three float32 matrices [matrices, rows, columns].

    largest: whether there is one more matrix, whose largest entries are the last result.
    Each [columns], in separate memory, as results of an op must be.
    """
    matrices, rows, columns = partial.shape
    totals = tuple(partial.new_empty(columns) for _ in range(matrices))
    sums = totals[:-1] if largest else totals
    first, second, third = (*sums, None, None)[:3]
    column_sums_kernel[(matrices * cdiv(columns, COLUMNS),)](
        partial, first, second, third, totals[-1] if largest else None, rows, columns,
        R=ROWS, C=COLUMNS, STAGES=STAGES, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return totals


def variant() -> Variant:
    """The variant of `column_sums`."""
    totals = dict.fromkeys(("first", "second", "third", "largest"), "*fp32")
    signature = {"partial": "*fp32", **totals, "rows": "i32", "columns": "i32"}
    sizes = {"R": ROWS, "C": COLUMNS, "STAGES": STAGES}
    return Variant(column_sums_kernel, signature, sizes, WARPS, 1, "column_sums", ("rows",))
