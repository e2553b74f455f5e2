"""Kernels of activation functions: with a few-bit copy of their input, and their gradient."""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from razorctl.ops import activation as op
from razorctl.ops import kernels
from razorctl.ops.packing import BITS
from razorctl.ops.triton import quantize
from razorctl.ops.triton.numbers import slope
from razorctl.ops.triton.packing import unpacked
from razorctl.ops.triton.tiles import COPY, SHAPE, affine, block, block_of_tile, blocks
from razorctl.ops.triton.variants import DTYPES, Variant, dtypes


@triton.jit
def activation_grad_kernel(
    dy, packed, zero_point, scale, dx, rows, columns, stride, tile_rows,
    FUNCTION: tl.constexpr, BITS: tl.constexpr, R: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A program has R rows of a tile and C columns; a thread loads V columns at once."""
    tile, row, column, inside = block_of_tile(rows, columns, tile_rows, R, C)
    codes = unpacked(packed, row, column, columns, inside, BITS, V)
    offset, step = affine(zero_point, scale, None, tile, column, columns)
    x = codes.to(tl.float32) * step[None, :] + offset[None, :]
    src = dy + row[:, None] * stride + column[None, :]
    result = tl.load(src, mask=inside, other=0.0).to(tl.float32) * slope(x, FUNCTION)
    to = dx + row[:, None] * columns + column[None, :]
    tl.store(to, result.to(dx.dtype.element_ty), mask=inside)


def activation_grad(
    dy: Tensor,
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bits: int,
    tile_rows: int,
    function: str,
) -> Tensor:
    """See `op.activation_grad`; computes in single precision."""
    rows, columns = dy.shape
    dx = dy.new_empty(rows, columns)
    sizes, warps = block(dy.dtype)
    activation_grad_kernel[(blocks(rows, columns, tile_rows, sizes),)](
        dy, packed, zero_point, scale, dx, rows, columns, dy.stride(0), tile_rows,
        FUNCTION=function, BITS=bits, **sizes, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return dx


def activation_quantize(
    x: Tensor, function: str, bits: int, tile_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `op.activation_quantize`."""
    y = x.new_empty(x.shape)
    rows = x.reshape(-1, x.shape[-1])
    copy = quantize.run(rows, bits, tile_rows, function=function, y=y)
    return y, *copy


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """What the launches of this file compile to."""
    for dtype in dtypes(capability, every):
        for function in op.FUNCTIONS if every else ("gelu",):
            for bits in BITS if every else (5,):
                sizes, warps = block(DTYPES[dtype])
                yield Variant(
                    activation_grad_kernel,
                    {"dy": f"*{dtype}", **COPY, "dx": f"*{dtype}", **SHAPE},
                    {"FUNCTION": function, "BITS": bits, **sizes},
                    warps,
                    1,
                    f"activation_grad {function} {bits} bits {dtype}",
                )
            yield from quantize.quantizing(
                dtype, BITS if every else (5,), function=function, every=every
            )


kernels.register(
    op.activation_grad, "cuda", activation_grad, lambda dy, *others: quantize.takes(dy)
)
kernels.register(
    op.activation_quantize,
    "cuda",
    activation_quantize,
    lambda x, *others: quantize.takes(x.reshape(-1, x.shape[-1])),
)
