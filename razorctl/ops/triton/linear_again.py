"""Kernels of ops.linear_again: int8 rows of f(x) and of a weight by one launch, and their product.

codes = round(f(x) / scale), scale = max |f(x)| / 127 of a row, for the x [rows, columns] of a copy.
A weight [outputs, columns] is rounded alike. Without a function, columns of x are divided and
columns of the weight multiplied by `r` of `op.evened`.
"""

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from razorctl.ops import kernels
from razorctl.ops import linear_again as op
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.op import FewBitCopy
from razorctl.ops.packing import BITS, GROUP
from razorctl.ops.triton.gemm import copied_gemm, scaled_gemm
from razorctl.ops.triton.int8 import codes_of, row_scale, warps_of_row
from razorctl.ops.triton.launch import all_registers, cdiv, launchable, next_power_of_2
from razorctl.ops.triton.numbers import activated, inverse
from razorctl.ops.triton.packing import unpacked_block
from razorctl.ops.triton.tiles import AHEAD, COPY, tile_affine
from razorctl.ops.triton.variants import KNOWN, Variant, dtypes

FLATTEST = constexpr(op.FLATTEST)
WIDEST = 8192  # most columns of a row that a program holds
ROWS = 16  # of x that a program works on one after the other
OUTPUTS = 4  # rows of the weight of a program: few, since there are few in all
VECTOR = 8  # columns whose bytes a thread loads at once


@triton.jit
def _roots(zero_point, scale, bias, column, columns, BITS: tl.constexpr):
    """See `r` of `op.evened`, [C]."""
    first, spacing = tile_affine(zero_point, scale, bias, 0, column, columns)
    last = first + (2**BITS - 1) * spacing
    root = tl.sqrt_rn(tl.sqrt_rn(tl.maximum(tl.abs(first), tl.abs(last))))
    root = tl.where(column < columns, root, 0.0)
    root = tl.maximum(root, FLATTEST * tl.max(root, 0))
    return tl.where((root > 0) & (root < float("inf")), root, 1.0)


@launchable
def row_operands_kernel(
    packed, zero_point, scale, bias, codes, code_scale, weight, of_weight, weight_scale,
    rows, columns, tile_rows, outputs, stride,
    FUNCTION: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    C: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A program rounds ROWS whole rows of a tile of x, or OUTPUTS of the weight, one by one."""
    along = tl.cdiv(tile_rows, ROWS)
    of_x = tl.cdiv(rows, tile_rows) * along
    number = tl.program_id(0)
    column = tl.max_contiguous(tl.arange(0, C), V)
    inside = (column < columns)[None, :]
    if number < of_x:
        tile = (number // along).to(tl.int64)
        start = number % along * ROWS
        first = tile * tile_rows + start
        last = tl.minimum(first + tl.minimum(ROWS, tile_rows - start), rows)
        offset, spacing = tile_affine(zero_point, scale, bias, tile, column, columns)
        if FUNCTION is None:
            by = _roots(zero_point, scale, bias, column, columns, BITS)
            offset, spacing = tl.div_rn(offset, by), tl.div_rn(spacing, by)
        for place in tl.range(first, last, num_stages=AHEAD):
            row = place + tl.zeros((1,), tl.int64)
            numbers = unpacked_block(packed, row, column, columns, inside, BITS, V)
            values = numbers.to(tl.float32) * spacing[None, :] + offset[None, :]
            if FUNCTION is not None:
                values = activated(values, FUNCTION)
            each = row_scale(values)
            to = codes + row[:, None] * columns + column[None, :]
            tl.store(to, codes_of(values, inverse(each)[:, None]), mask=inside)
            tl.store(code_scale + row, each)
    else:
        first = (number - of_x).to(tl.int64) * OUTPUTS
        if FUNCTION is None:
            by = _roots(zero_point, scale, bias, column, columns, BITS)
        for place in tl.range(first, tl.minimum(first + OUTPUTS, outputs), num_stages=AHEAD):
            row = place + tl.zeros((1,), tl.int64)
            src = weight + row[:, None] * stride + column[None, :]
            values = tl.load(src, mask=inside, other=0.0).to(tl.float32)
            if FUNCTION is None:
                values *= by[None, :]
            each = row_scale(values)
            to = of_weight + row[:, None] * columns + column[None, :]
            tl.store(to, codes_of(values, inverse(each)[:, None]), mask=inside)
            tl.store(weight_scale + row, each)


def takes(
    copy: FewBitCopy,
    rows: int,
    function: str | None,
    weight: Tensor,
    offset: Tensor | None,
    dtype: torch.dtype,
) -> bool:
    """Whether the kernels take these arguments."""
    columns = copy.scale.shape[1]
    fits = columns % GROUP == 0 and columns <= WIDEST
    known = weight.dtype in KNOWN and dtype in KNOWN and copy.scale.dtype != torch.float64
    return fits and known and rows * weight.numel() > 0


def row_operands(
    copy: FewBitCopy, rows: int, function: str | None, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The codes and scales of f(x), [rows, columns] and [rows, 1], and of the weight."""
    packed, zero_point, scale, bits, tile_rows, bias = copy
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    (tiles, columns), outputs = scale.shape, weight.shape[0]
    codes = packed.new_empty(rows, columns, dtype=torch.int8)
    code_scale = packed.new_empty(rows, 1, dtype=torch.float32)
    of_weight = codes.new_empty(outputs, columns)
    weight_scale = code_scale.new_empty(outputs)
    held = next_power_of_2(columns)
    warps = warps_of_row(held)
    row_operands_kernel[(tiles * cdiv(tile_rows, ROWS) + cdiv(outputs, OUTPUTS),)](
        packed, zero_point, scale, bias, codes, code_scale, weight, of_weight, weight_scale,
        rows, columns, tile_rows, outputs, weight.stride(0),
        FUNCTION=function, BITS=bits, ROWS=ROWS, OUTPUTS=OUTPUTS, C=held, V=VECTOR,
        num_warps=warps, num_stages=1, maxnreg=all_registers(warps),
    )  # fmt: skip
    return codes, code_scale, of_weight, weight_scale


@kernels.register(op.linear_again, "cuda", takes)
def linear_again(
    copy: FewBitCopy,
    rows: int,
    function: str | None,
    weight: Tensor,
    offset: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    codes, scale, outputs, out_scale = row_operands(copy, rows, function, weight)
    return scaled_gemm(codes, outputs, scale, out_scale, dtype, *op.outer(offset, scale))


@kernels.register(
    op.linear_copy_again,
    "cuda",
    lambda copy, rows, function, weight, *others: (
        weight.shape[0] % GROUP == 0 and takes(copy, rows, function, weight, *others)
    ),
)
def linear_copy_again(
    copy: FewBitCopy,
    rows: int,
    function: str | None,
    weight: Tensor,
    offset: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    codes, scale, outputs, out_scale = row_operands(copy, rows, function, weight)
    return copied_gemm(codes, outputs, scale, out_scale, dtype, *op.outer(offset, scale))


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """The variants that this file launches, but for those of the product."""
    some = [(None, 5), ("gelu", 5)]
    result = {"codes": "*i8", "code_scale": "*fp32"}
    shape = dict.fromkeys(("rows", "columns", "tile_rows", "outputs", "stride"), "i32")
    kinds = dtypes(capability, every) if every else (*dtypes(capability, every), "fp32")
    of_norm = {**COPY, "scale": "*fp32", "bias": "*fp32"}
    for function, bits in product((None, *FUNCTIONS), BITS) if every else some:
        for held, kind in product((1024, 2048, 4096, WIDEST) if every else (WIDEST,), kinds):
            weight = {"weight": f"*{kind}", "of_weight": "*i8", "weight_scale": "*fp32"}
            sizes = {"ROWS": ROWS, "OUTPUTS": OUTPUTS, "C": held, "V": VECTOR}
            warps = warps_of_row(held)
            yield Variant(
                row_operands_kernel, {**of_norm, **result, **weight, **shape},
                {"FUNCTION": function, "BITS": bits, **sizes}, warps, 1,
                f"row_operands {held} {bits} bits {function} {kind}",
                most_registers=all_registers(warps),
            )  # fmt: skip
