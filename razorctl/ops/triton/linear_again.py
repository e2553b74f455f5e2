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
from razorctl.ops.triton.int8 import codes_of, scale_of
from razorctl.ops.triton.launch import cdiv, launchable
from razorctl.ops.triton.numbers import inverse, larger, magnitude, short_activated
from razorctl.ops.triton.packing import unpacked_block
from razorctl.ops.triton.tiles import COPY, chunks_of, rows_of_tile, tile_affine
from razorctl.ops.triton.variants import KNOWN, Variant, dtypes

FLATTEST = constexpr(op.FLATTEST)
WIDEST = 8192  # most columns of a row that a program holds
HELD = 1024  # elements of chunks of rows that a program computes at once
ROWS = 16  # of x of a program
OUTPUTS = 4  # rows of the weight of a program: few, since there are few in all
WARPS = 4
VECTOR = 8  # columns whose bytes a thread loads at once


@triton.jit
def _root(zero_point, scale, bias, column, columns, BITS: tl.constexpr):
    """`r` of `op.evened` before it is limited, [C]."""
    first, spacing = tile_affine(zero_point, scale, bias, 0, column, columns)
    last = first + (2**BITS - 1) * spacing
    root = tl.sqrt_rn(tl.sqrt_rn(tl.maximum(tl.abs(first), tl.abs(last))))
    return tl.where(column < columns, root, 0.0)


@triton.jit
def _limited(root, largest):
    """`r` of `op.evened`, [C]; largest: of all columns."""
    root = tl.maximum(root, FLATTEST * largest)
    return tl.where((root > 0) & (root < float("inf")), root, 1.0)


@triton.jit
def _roots(
    zero_point, scale, bias, columns, BITS: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """See `r` of `op.evened`, a tuple of chunks [C]."""
    largest = tl.zeros((C,), tl.float32)
    roots, limited = (), ()
    for i in tl.static_range(CHUNKS):
        root = _root(zero_point, scale, bias, i * C + tl.arange(0, C), columns, BITS)
        largest = tl.maximum(largest, root)
        roots += (root,)
    top = tl.max(largest, 0)
    for i in tl.static_range(CHUNKS):
        limited += (_limited(roots[i], top),)
    return limited


@triton.jit
def _store_rows(
    values, codes, code_scale, row, there, columns, C: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """Stores the codes and the scales of rows in chunks, of which those at `there` exist."""
    top = tl.abs(values[0])
    for i in tl.static_range(1, CHUNKS):
        top = larger(top, tl.abs(values[i]))
    each = scale_of(tl.max(magnitude(top), 1))
    factor = inverse(each)[:, None]
    tl.store(code_scale + row, each, mask=there)
    for i in tl.static_range(CHUNKS):
        column = i * C + tl.arange(0, C)
        to = codes + row[:, None] * columns + column[None, :]
        inside = there[:, None] & (column < columns)[None, :]
        tl.store(to, codes_of(values[i], factor), mask=inside)


@launchable
def row_operands_kernel(
    packed, zero_point, scale, bias, codes, code_scale, weight, of_weight, weight_scale,
    rows, columns, tile_rows, outputs, stride,
    FUNCTION: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, CHUNKS: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A program rounds ROWS whole rows of a tile of x, or OUTPUTS of the weight, R at a time.

    With several rows at a time, a warp has whole rows, so that no maximum crosses warps.
    """
    of_x = tl.cdiv(rows, tile_rows) * tl.cdiv(tile_rows, ROWS)
    number = tl.program_id(0)
    if number < of_x:
        tile, first, last = rows_of_tile(number, rows, tile_rows, ROWS)
        offsets, spacings = (), ()
        for i in tl.static_range(CHUNKS):
            column = i * C + tl.arange(0, C)
            offset, spacing = tile_affine(zero_point, scale, bias, tile, column, columns)
            offsets += (offset,)
            spacings += (spacing,)
        if FUNCTION is None:
            by = _roots(zero_point, scale, bias, columns, BITS, C, CHUNKS)
            even_offsets, even_spacings = (), ()
            for i in tl.static_range(CHUNKS):
                even_offsets += (tl.div_rn(offsets[i], by[i]),)
                even_spacings += (tl.div_rn(spacings[i], by[i]),)
            offsets, spacings = even_offsets, even_spacings
        for place in range(first, last, R):
            row = place + tl.arange(0, R).to(tl.int64)
            there = row < last
            values = ()
            for i in tl.static_range(CHUNKS):
                column = i * C + tl.arange(0, C)
                inside = there[:, None] & (column < columns)[None, :]
                numbers = unpacked_block(packed, row, column, columns, inside, BITS, V)
                each = numbers.to(tl.float32) * spacings[i][None, :] + offsets[i][None, :]
                if FUNCTION is not None:
                    each = short_activated(each, FUNCTION)
                values += (tl.where(inside, each, 0.0),)
            _store_rows(values, codes, code_scale, row, there, columns, C, CHUNKS)
    else:
        first = (number - of_x).to(tl.int64) * OUTPUTS
        last = tl.minimum(first + OUTPUTS, outputs)
        if FUNCTION is None:
            by = _roots(zero_point, scale, bias, columns, BITS, C, CHUNKS)
        for place in range(first, last, R):
            row = place + tl.arange(0, R).to(tl.int64)
            there = row < last
            values = ()
            for i in tl.static_range(CHUNKS):
                column = i * C + tl.arange(0, C)
                inside = there[:, None] & (column < columns)[None, :]
                src = weight + row[:, None] * stride + column[None, :]
                each = tl.load(src, mask=inside, other=0.0).to(tl.float32)
                if FUNCTION is None:
                    each *= by[i][None, :]
                values += (each,)
            _store_rows(values, of_weight, weight_scale, row, there, columns, C, CHUNKS)


def _sizes(columns: int) -> dict[str, int]:
    """The sizes of a program."""
    width, chunks = chunks_of(columns, 256 if columns <= HELD else HELD)
    return {"R": max(1, HELD // width), "C": width, "CHUNKS": chunks, "V": VECTOR}


def takes(
    copy: FewBitCopy,
    rows: int,
    function: str | None,
    weight: Tensor,
    offset: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> bool:
    """Whether the kernels take these arguments."""
    columns = copy.scale.shape[1]
    fits = columns % GROUP == 0 and columns <= WIDEST
    known = weight.dtype in KNOWN and dtype in KNOWN and copy.scale.dtype != torch.float64
    return fits and known and rows * weight.numel() > 0


@kernels.register(op.row_operands, "cuda", takes)
def row_operands(
    copy: FewBitCopy, rows: int, function: str | None, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    packed, zero_point, scale, bits, tile_rows, bias = copy
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    (tiles, columns), outputs = scale.shape, weight.shape[0]
    codes = packed.new_empty(rows, columns, dtype=torch.int8)
    code_scale = packed.new_empty(rows, 1, dtype=torch.float32)
    of_weight = codes.new_empty(outputs, columns)
    weight_scale = code_scale.new_empty(outputs)
    row_operands_kernel[(tiles * cdiv(tile_rows, ROWS) + cdiv(outputs, OUTPUTS),)](
        packed, zero_point, scale, bias, codes, code_scale, weight, of_weight, weight_scale,
        rows, columns, tile_rows, outputs, weight.stride(0),
        FUNCTION=function, BITS=bits, ROWS=ROWS, OUTPUTS=OUTPUTS, **_sizes(columns),
        num_warps=WARPS, num_stages=1,
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
        for columns, kind in product((768, 1536, 4096, WIDEST) if every else (WIDEST,), kinds):
            weight = {"weight": f"*{kind}", "of_weight": "*i8", "weight_scale": "*fp32"}
            sizes = {"ROWS": ROWS, "OUTPUTS": OUTPUTS, **_sizes(columns)}
            yield Variant(
                row_operands_kernel, {**of_norm, **result, **weight, **shape},
                {"FUNCTION": function, "BITS": bits, **sizes}, WARPS, 1,
                f"row_operands {columns} {bits} bits {function} {kind}",
            )  # fmt: skip
