"""Kernel of ops.int8_row_operand: codes = round(f(x) / scale), scale = max |f(x)| / 127 of a row.

For the x [rows, columns] of a copy.
"""

from collections.abc import Iterator
from itertools import product

import torch
import triton.language as tl
from torch import Tensor

from razorctl.ops import int8_row_operand as op
from razorctl.ops import kernels
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.op import FewBitCopy
from razorctl.ops.packing import BITS, GROUP
from razorctl.ops.triton.int8 import codes_of, row_scale, warps_of_row
from razorctl.ops.triton.launch import all_registers, cdiv, launchable, next_power_of_2
from razorctl.ops.triton.numbers import activated, inverse
from razorctl.ops.triton.packing import unpacked_block
from razorctl.ops.triton.tiles import AHEAD, COPY, tile_affine
from razorctl.ops.triton.variants import Variant

WIDEST = 8192  # most columns of a row that a program holds
ROWS = 16  # that a program works on one after the other
VECTOR = 8  # columns whose bytes a thread loads at once


@launchable
def int8_row_operand_kernel(
    packed, zero_point, scale, bias, codes, code_scale, rows, columns, tile_rows,
    FUNCTION: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A program rounds ROWS whole rows of a tile, one by one."""
    along = tl.cdiv(tile_rows, ROWS)
    tile = (tl.program_id(0) // along).to(tl.int64)
    start = tl.program_id(0) % along * ROWS
    first = tile * tile_rows + start
    last = tl.minimum(first + tl.minimum(ROWS, tile_rows - start), rows)
    column = tl.arange(0, C)
    inside = (column < columns)[None, :]
    offset, spacing = tile_affine(zero_point, scale, bias, tile, column, columns)
    for number in tl.range(first, last, num_stages=AHEAD):
        row = number + tl.zeros((1,), tl.int64)
        numbers = unpacked_block(packed, row, column, columns, inside, BITS, V)
        values = numbers.to(tl.float32) * spacing[None, :] + offset[None, :]
        if FUNCTION is not None:
            values = activated(values, FUNCTION)
        each = row_scale(values)
        to = codes + row[:, None] * columns + column[None, :]
        tl.store(to, codes_of(values, inverse(each)[:, None]), mask=inside)
        tl.store(code_scale + row, each)


def takes(copy: FewBitCopy, rows: int, function: str | None) -> bool:
    """Whether the kernel takes these arguments."""
    columns = copy.scale.shape[1]
    fits = columns % GROUP == 0 and columns <= WIDEST
    return fits and rows * columns > 0 and copy.scale.dtype != torch.float64


@kernels.register(op.int8_row_operand, "cuda", takes)
def int8_row_operand(copy: FewBitCopy, rows: int, function: str | None) -> tuple[Tensor, Tensor]:
    packed, zero_point, scale, bits, tile_rows, bias = copy
    tiles, columns = scale.shape
    codes = packed.new_empty(rows, columns, dtype=torch.int8)
    code_scale = packed.new_empty(rows, 1, dtype=torch.float32)
    held = next_power_of_2(columns)
    warps = warps_of_row(held)
    int8_row_operand_kernel[(tiles * cdiv(tile_rows, ROWS),)](
        packed, zero_point, scale, bias, codes, code_scale, rows, columns, tile_rows,
        FUNCTION=function, BITS=bits, ROWS=ROWS, C=held, V=VECTOR,
        num_warps=warps, num_stages=1, maxnreg=all_registers(warps),
    )  # fmt: skip
    return codes, code_scale


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """The variants that this file launches."""
    some = [(None, 5), ("gelu", 5)]
    result = {"codes": "*i8", "code_scale": "*fp32"}
    shape = {"rows": "i32", "columns": "i32", "tile_rows": "i32"}
    for function, bits in product((None, *FUNCTIONS), BITS) if every else some:
        for held in (1024, 2048, 4096, WIDEST) if every else (WIDEST,):
            copy = {**COPY, "scale": "*fp32", "bias": "*fp32"}  # of a norm
            sizes = {"ROWS": ROWS, "C": held, "V": VECTOR}
            warps = warps_of_row(held)
            yield Variant(
                int8_row_operand_kernel, {**copy, **result, **shape},
                {"FUNCTION": function, "BITS": bits, **sizes}, warps, 1,
                f"int8_row_operand {held} {bits} bits {function}",
                most_registers=all_registers(warps),
            )  # fmt: skip
