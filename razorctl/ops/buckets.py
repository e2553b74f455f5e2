"""Codes of a function's argument that determine its derivative: numbers of intervals.

Forward: code = how many of the 2^bits - 1 ends are below x, of any shape. Backward: f'(r) dy, where
r is the stand-in of the interval; `from_buckets` returns r.

The backward pass of GELU or SiLU needs nothing but the derivative, which is nearly constant over
long stretches, so a few intervals suffice (Few-bit backward, Novikov et al., 2023). The intervals
minimize the squared error of the derivative over inputs from real models;
scripts/bench/derive_buckets.py computes them and writes buckets.json.
"""

import json
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops.op import Fused, op
from razorctl.ops.packing import pack, packed_bytes, unpack

FUNCTIONS = ("gelu", "silu")  # that have a table; the others use GELU's
BITS = (4, 3, 2)


@cache
def bucket_table(function: str, bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The 2 ** bits - 1 ends between intervals in ascending order, and a stand-in for each.

    The derivative at a stand-in is the mean of the derivative in its interval.
    """
    if function == "hardswish":
        return _of_hardswish(2**bits - 2)
    tables = json.loads(Path(__file__).with_name("buckets.json").read_text("utf-8"))["tables"]
    entry = tables[function if function in FUNCTIONS else "gelu"][str(bits)]
    return tuple(entry["ends"]), tuple(entry["stand_ins"])


def _of_hardswish(inner: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The table of a derivative that is constant beyond -3 and 3, with `inner` parts between."""
    ends = tuple(6 * part / inner - 3 for part in range(inner + 1))
    return ends, (-4.0, *(end + 3 / inner for end in ends[:-1]), 4.0)


@op(
    empty=lambda x, function, bits: x.new_empty(
        packed_bytes(1, x.numel(), bits), dtype=torch.uint8
    ),
    fused=Fused(),
)
def to_buckets(x: Tensor, function: str, bits: int) -> Tensor:
    """The packed numbers of the intervals of the elements of `x`, of any shape.

    Returns uint8 [packed_bytes(1, x.numel(), bits)].
    """
    ends = torch.tensor(bucket_table(function, bits)[0], dtype=x.dtype, device=x.device)
    numbers = torch.bucketize(x, ends, out_int32=True).to(torch.uint8)
    return pack(numbers.view(1, -1), bits)


@op(
    empty=lambda packed, shape, function, bits, dtype: packed.new_empty(shape, dtype=dtype),
    fused=Fused(),
)
def from_buckets(
    packed: Tensor, shape: list[int], function: str, bits: int, dtype: torch.dtype
) -> Tensor:
    """The stand-ins for an `x` of `shape` that `to_buckets` packed."""
    stand_ins = torch.tensor(bucket_table(function, bits)[1], dtype=dtype, device=packed.device)
    numbers = unpack(packed, bits, 1, torch.Size(shape).numel())
    return stand_ins.index_select(0, numbers.view(-1).int()).view(shape)


kernels.attach(__name__)
