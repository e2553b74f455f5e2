"""The kernel of ops.columns: out [n, s] = x[:, index] for x [n, d] and index [s]."""

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from razorctl.ops import columns as op
from razorctl.ops import kernels
from razorctl.ops.triton.launch import cdiv, launchable
from razorctl.ops.triton.variants import Variant

COLUMNS = 128  # that a program gathers
WARPS, STAGES = 4, 2
REGISTERS = 64  # of a thread: without a limit ptxas may take 48 and spill
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@launchable
def gather_kernel(
    x, index, out, rows, columns, row_stride, column_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program gathers a tile of x[:, index], which has `columns` columns."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = tl.load(index + column, column < columns, 0) * column_stride
    src = x + row[:, None] * row_stride + at[None, :]
    to = out + row[:, None] * columns + column[None, :]
    tl.store(to, tl.load(src, inside), inside)


def _rows(size: int) -> int:
    """The rows that a program gathers, of elements of `size` bytes."""
    return 8 if size == 8 else 16  # with 16 rows of 8 bytes threads spill


@kernels.register(op.gather_columns, "cuda")
def gather_columns(x: Tensor, index: Tensor) -> Tensor:
    out = x.new_empty(len(x), len(index))
    if not out.numel():
        return out
    integers, rows = INTEGERS[x.element_size()], _rows(x.element_size())
    grid = (cdiv(len(x), rows), cdiv(len(index), COLUMNS))
    gather_kernel[grid](
        x.view(integers), index, out.view(integers), *out.shape, x.stride(0), x.stride(1),
        ROWS=rows, COLUMNS=COLUMNS, num_warps=WARPS, num_stages=STAGES, maxnreg=REGISTERS,
    )  # fmt: skip
    return out


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """The variants of the launch above; tiles of four bytes take most registers."""
    sizes = {"rows": "i32", "columns": "i32", "row_stride": "i32"}
    for bits in (8, 16, 32, 64) if every else (32, 64):
        kind = f"*i{bits}"
        signature = {"x": kind, "index": "*i64", "out": kind, **sizes}
        constants = {"ROWS": _rows(bits // 8), "COLUMNS": COLUMNS, "column_stride": 1}
        yield Variant(
            gather_kernel, signature, constants, WARPS, STAGES, f"gather_columns i{bits}",
            unaligned=("rows", "columns"), most_registers=REGISTERS,
        )  # fmt: skip
