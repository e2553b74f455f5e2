"""Kernels of ops.buckets: code = how many ends are below x, and the stand-in of each code.

The whole tensor is one line of codes.
"""

from collections.abc import Iterator

import torch
import triton.language as tl
from torch import Tensor

from razorctl.ops import buckets as op
from razorctl.ops import kernels
from razorctl.ops.packing import GROUP, packed_bytes
from razorctl.ops.triton.launch import cdiv, launchable
from razorctl.ops.triton.packing import (
    STRIPS,
    first_width,
    in_byte,
    placed,
    store_others,
    unpacked_block,
)
from razorctl.ops.triton.tiles import VECTOR
from razorctl.ops.triton.variants import DTYPES, KNOWN, Variant, dtypes

SPAN = 512  # codes of each strip in a program that packs
RESTORED = 1024  # elements in a program that restores
WARPS = 4


@launchable
def to_buckets_kernel(
    x, packed, count, line, ENDS: tl.constexpr, BITS: tl.constexpr, U: tl.constexpr
):
    """A program packs U elements of each strip. line: count, rounded up to a multiple of 64."""
    strip = tl.multiple_of(line // STRIPS, 8)
    u = tl.program_id(0) * U + tl.arange(0, U)
    word = tl.zeros((U,), tl.int32)
    for plane in tl.static_range(first_width(BITS)):
        for i in tl.static_range(in_byte(BITS)):
            s = i * first_width(BITS) + plane
            inside = (u < strip) & (s * strip + u < count)
            values = tl.load(x + s * strip + u, mask=inside, other=0.0).to(tl.float32)
            # In single precision: LLVM would use 3-bit integers, for which it takes a stack.
            number = tl.zeros((U,), tl.float32)
            for j in tl.static_range(2**BITS - 1):
                number += tl.where(values <= ENDS[j], 0.0, 1.0)
            number = tl.where(inside, number, 0.0).to(tl.int32)
            word |= placed(number, i, s, BITS)
        tl.store(packed + plane * strip + u, word.to(tl.uint8), mask=u < strip)
        word &= -256
    store_others(packed + u, word, strip, u < strip, BITS)


@launchable
def from_buckets_kernel(
    packed, y, count, line,
    STAND_INS: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """A program restores C elements."""
    column = tl.program_id(0) * C + tl.arange(0, C)
    inside = (column < count)[None, :]
    number = unpacked_block(packed, tl.zeros((1,), tl.int64), column, line, inside, BITS, V)
    values = tl.full((1, C), STAND_INS[0], tl.float32)
    for i in tl.static_range(1, 2**BITS):
        values = tl.where(number == i, STAND_INS[i], values)
    tl.store(y + column[None, :], values.to(y.dtype.element_ty), mask=inside)


def _rounded(values: tuple[float, ...], dtype: torch.dtype) -> tuple[float, ...]:
    return tuple(torch.tensor(values, dtype=dtype).tolist())


def _line(count: int) -> int:
    return -(-count // GROUP) * GROUP


def _fits(count: int, dtype: torch.dtype) -> bool:
    return 0 < count < 2**31 - GROUP and dtype in KNOWN


@kernels.register(op.to_buckets, "cuda", lambda x, *_: _fits(x.numel(), x.dtype))
def to_buckets(x: Tensor, function: str, bits: int) -> Tensor:
    count = x.numel()
    packed = x.new_empty(packed_bytes(1, count, bits), dtype=torch.uint8)
    ends = _rounded(op.bucket_table(function, bits)[0], x.dtype)
    to_buckets_kernel[(cdiv(_line(count) // 8, SPAN),)](
        x.contiguous(), packed, count, _line(count),
        ENDS=ends, BITS=bits, U=SPAN, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return packed


@kernels.register(
    op.from_buckets,
    "cuda",
    lambda packed, shape, function, bits, dtype: _fits(torch.Size(shape).numel(), dtype),
)
def from_buckets(
    packed: Tensor, shape: list[int], function: str, bits: int, dtype: torch.dtype
) -> Tensor:
    y = packed.new_empty(shape, dtype=dtype)
    from_buckets_kernel[(cdiv(y.numel(), RESTORED),)](
        packed, y, y.numel(), _line(y.numel()),
        STAND_INS=_rounded(op.bucket_table(function, bits)[1], dtype), BITS=bits, C=RESTORED,
        V=VECTOR // dtype.itemsize, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return y


def variants(capability: int, every: bool = False) -> Iterator[Variant]:
    """The variants that this file launches."""
    size = {"count": "i32", "line": "i32"}
    for dtype in dtypes(capability, every):
        for bits in op.BITS if every else (4,):
            ends, stand_ins = (_rounded(t, DTYPES[dtype]) for t in op.bucket_table("gelu", bits))
            yield Variant(
                to_buckets_kernel, {"x": f"*{dtype}", "packed": "*u8", **size},
                {"ENDS": ends, "BITS": bits, "U": SPAN}, WARPS, 1,
                f"to_buckets {bits} bits {dtype}",
            )  # fmt: skip
            sizes = {"BITS": bits, "C": RESTORED, "V": VECTOR // DTYPES[dtype].itemsize}
            yield Variant(
                from_buckets_kernel, {"packed": "*u8", "y": f"*{dtype}", **size},
                {"STAND_INS": stand_ins, **sizes}, WARPS, 1, f"from_buckets {bits} bits {dtype}",
            )  # fmt: skip
