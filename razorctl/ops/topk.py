"""Exact-k element top-k: k values and one bit per element (Back Razor, NeurIPS 2022).

Forward: the k elements of largest |x|, and one bit for each of the n elements. Backward: the dense
x with these elements if the bit is set, and 0 elsewhere.

Exactly k elements are stored, among equal ones those at the lowest positions. So the stored bytes
depend only on shapes. A `>=` threshold would store every element if more than numel - k are 0.

On a CPU the ops process the whole tensor at once, with temporaries several times its size. Other
devices process chunks, so that temporaries do not take the memory that pruning frees. Both select
the same elements.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops.op import Fused, op

CHUNK = 1 << 21  # elements; a multiple of 8. Temporaries take some 40 bytes per element
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def magnitude_keys(x: Tensor) -> Tensor:
    """Integers of the same width and in the order of |x|, with NaN above infinity."""
    # A total order: comparisons with NaN would otherwise select fewer than k elements.
    return x.abs().view(_INTEGERS[x.element_size()])


def _mask(keys: Tensor, smallest: Tensor, ties_kept: Tensor, before: Tensor | int = 0) -> Tensor:
    """True for keys above `smallest`, and for the first `ties_kept` keys equal to it.

    before: the number of equal keys in earlier chunks.
    """
    ties = keys == smallest
    # cumsum would cast, too; an explicit cast is counted by planning.
    first = ties.int().cumsum(0, dtype=torch.int32) <= ties_kept - before
    return (keys > smallest) | (ties & first)


def pack_bits(mask: Tensor) -> Tensor:
    """Bool [n] to uint8 [ceil(n / 8)], element i in bit i % 8 of byte i // 8."""
    bits = F.pad(mask, (0, -mask.numel() % 8)).view(-1, 8).to(torch.uint8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(
        1, dtype=torch.uint8
    )


def empty_bits(x: Tensor) -> Tensor:
    """The result of `pack_bits` for a mask of the size of `x`, without values."""
    return x.new_empty((x.numel() + 7) // 8, dtype=torch.uint8)


def unpack_bits(bitmap: Tensor, n: int) -> Tensor:
    """The inverse of `pack_bits`: bool [n]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bitmap.device)
    return (bitmap[:, None] >> shifts).bitwise_and_(1).view(-1)[:n].bool()


def _from(x: Tensor, keys: Tensor, k: int, smallest: Tensor) -> tuple[Tensor, Tensor]:
    """The values and the bitmap of the k elements of `x` [n] with keys from `smallest` on."""
    mask = _mask(keys, smallest, k - (keys > smallest).sum())
    return x[torch.nonzero_static(mask, size=k).squeeze(1)], pack_bits(mask)


def _nothing(x: Tensor) -> tuple[Tensor, Tensor]:
    """The results of `topk_pack` for an empty tensor."""
    return x.clone(), x.new_empty(0, dtype=torch.uint8)


def topk_unpack_on_cpu(values: Tensor, bitmap: Tensor, shape: list[int]) -> Tensor:
    """`topk_unpack` on a CPU."""
    dense = values.new_zeros(shape)
    return dense.masked_scatter_(unpack_bits(bitmap, dense.numel()).view(shape), values)


def radix_select(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The key at `rank` in the ascending order of the keys of `x` [n], and the number above it.

    Both are 0-dim. A histogram finds 16 bits at a time, from the highest down.
    """
    bits = 8 * x.element_size()
    chosen = torch.zeros((1,), dtype=torch.int64, device=x.device)  # the bits fixed so far
    left = chosen + rank  # rank among the keys that have them
    above = torch.zeros_like(chosen)
    for shift in range(bits - 16, -1, -16):
        counts = torch.zeros(1 << 16, dtype=torch.int64, device=x.device)
        for part in torch.split(x, CHUNK):
            keys = magnitude_keys(part).long() >> shift
            counts.scatter_add_(0, keys & 0xFFFF, (keys >> 16 == chosen).long())
        ends = counts.cumsum(0)
        digit = torch.searchsorted(ends, left, right=True)
        end = ends.gather(0, digit)
        above += ends[-1:] - end
        left = left - end + counts.gather(0, digit)
        chosen = (chosen << 16) | digit
    return chosen.squeeze(0).to(_INTEGERS[x.element_size()]), above.squeeze(0)


@op(
    empty=lambda x, k: (x.new_empty(k), empty_bits(x)),
    # One histogram per byte, and counts.
    fused=lambda x, k: Fused(launches=7, again=(x.element_size() + 1) * x.nbytes),
)
def topk_pack(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k elements of largest |x| (1 <= k <= numel, or 0 for an empty x), in order of position.

    Returns their values [k] in x's dtype and the uint8 bitmap [ceil(numel / 8)] of their positions.
    """
    x = x.reshape(-1)
    if not x.numel():
        return _nothing(x)
    smallest, above = radix_select(x, x.numel() - k)
    bitmap = empty_bits(x)
    values = x.new_empty(k + 1)  # the last one receives pruned elements
    ties = start = torch.zeros((), dtype=torch.int64, device=x.device)
    for part, bits in zip(torch.split(x, CHUNK), torch.split(bitmap, CHUNK // 8), strict=True):
        keys = magnitude_keys(part)
        mask = _mask(keys, smallest, k - above, ties)
        ties = ties + (keys == smallest).sum()
        place = mask.long().cumsum(0).add_(start - 1)
        start = place[-1] + 1
        values.scatter_(0, place.masked_fill_(~mask, k), part)
        bits.copy_(pack_bits(mask))
    return values[:k].clone(), bitmap


def topk_pack_on_cpu(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`topk_pack` on a CPU."""
    flat = x.reshape(-1)
    if not flat.numel():
        return _nothing(flat)
    keys, rank = magnitude_keys(flat), flat.numel() - k
    # numpy's selection is vectorized: 13 times as fast as torch's on half a million keys.
    smallest = torch.tensor(np.partition(keys.numpy(), rank)[rank], dtype=keys.dtype)
    return _from(flat, keys, k, smallest)


@op(
    empty=lambda values, bitmap, shape: values.new_empty(shape),
    fused=lambda values, bitmap, shape: Fused(launches=2, again=bitmap.nbytes),
)
def topk_unpack(values: Tensor, bitmap: Tensor, shape: list[int]) -> Tensor:
    """The dense tensor of `shape`: `values` at the positions in `bitmap`, 0 elsewhere."""
    dense = values.new_empty(shape)
    if not dense.numel():
        return dense
    start = torch.zeros((), dtype=torch.int64, device=values.device)
    for part, bits in zip(
        torch.split(dense.view(-1), CHUNK), torch.split(bitmap, CHUNK // 8), strict=True
    ):
        mask = unpack_bits(bits, part.numel())
        place = mask.long().cumsum(0).add_(start - 1)
        start = place[-1] + 1
        torch.where(mask, values[place.clamp_(min=0)], values.new_zeros(()), out=part)
    return dense
