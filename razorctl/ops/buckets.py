"""Codes of a function's argument that tell its derivative: the interval that it lies in.

Forward: code = how many of the 2^bits - 1 ends are below x, of any shape. Backward: f'(r) dy, where
r is the stand-in of the interval; `from_buckets` gives r.

The derivative of GELU or SiLU is all that their backward pass needs. It is nearly constant over
long stretches, so few intervals tell it (Few-bit backward, Novikov et al., 2023). The intervals are
those of the least squared error of the derivative over inputs that real models were seen to have;
scripts/bench/derive_buckets.py finds them and writes buckets.json.
"""

import json
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from razorctl.ops import kernels
from razorctl.ops.op import Fused, op
from razorctl.ops.packing import pack, packed_bytes, unpack

FUNCTIONS = ("gelu", "silu")  # with a table of their own; the others take GELU's
BITS = (4, 3, 2)


@cache
def table(function: str, bits: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The ends between the intervals in ascending order, and a stand-in for each interval.

    There are 2 ** bits - 1 ends. The derivative at a stand-in is the mean of the derivative in its
    interval.
    """
    if function == "hardswish":
        return _of_hardswish(2**bits - 2)
    tables = json.loads(Path(__file__).with_name("buckets.json").read_text("utf-8"))["tables"]
    found = tables[function if function in FUNCTIONS else "gelu"][str(bits)]
    return tuple(found["ends"]), tuple(found["stand_ins"])


def _of_hardswish(inner: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`table`: the derivative is constant beyond -3 and 3, and a line in `inner` parts between."""
    ends = tuple(6 * part / inner - 3 for part in range(inner + 1))
    return ends, (-4.0, *(end + 3 / inner for end in ends[:-1]), 4.0)


@op(
    empty=lambda x, function, bits: x.new_empty(
        packed_bytes(1, x.numel(), bits), dtype=torch.uint8
    ),
    fused=Fused(),
)
def to_buckets(x: Tensor, function: str, bits: int) -> Tensor:
    """The numbers of the intervals that the elements of `x`, of any shape, lie in, packed.

    Returns uint8 [packed_bytes(1, x.numel(), bits)].
    """
    ends = torch.tensor(table(function, bits)[0], dtype=x.dtype, device=x.device)
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
    stand_ins = torch.tensor(table(function, bits)[1], dtype=dtype, device=packed.device)
    numbers = unpack(packed, bits, 1, torch.Size(shape).numel())
    return stand_ins.index_select(0, numbers.view(-1).int()).view(shape)


kernels.attach(__name__)
