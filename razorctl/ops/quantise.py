"""Few-bit copies: codes of 8, 4, 3 or 2 bits with an offset and a step for each tile.

A tile is one column of one block of rows, so a value is offset + step * code, with the least and
the greatest value of its tile as ends. Group-wise quantisation for the backward pass is ActNN's
(Chen et al., 2021) and Mesa's (Pan et al., 2021); tiles are columns here, because a GEMM that
contracts rows can take the codes as they are.
"""

import torch
from torch import Tensor

BITS = (8, 4, 3, 2)
PLANES = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}  # widths that pack into bytes, lowest bits first


def packed_bytes(numel: int, bits: int) -> int:
    """The size of `pack`'s result."""
    return sum(-(-numel * width // 8) for width in PLANES[bits])


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes below 2 ** bits, of any shape -> uint8 [packed_bytes].

    A byte holds elements that lie far apart, so that every operation runs over long stretches.
    """
    flat, planes, shift = codes.reshape(-1), [], 0
    for width in PLANES[bits]:
        plane = flat if bits == width else (flat >> shift) & (2**width - 1)
        size = -(-plane.numel() * width // 8)
        packed = plane[:size].clone() if width < 8 else plane
        for i in range(1, 8 // width):
            part = plane[i * size : (i + 1) * size]
            packed[: part.numel()] |= part << (i * width)
        planes.append(packed)
        shift += width
    return planes[0] if len(planes) == 1 else torch.cat(planes)


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """The inverse of `pack`: uint8 [numel]."""
    codes, start, shift = None, 0, 0
    for width in PLANES[bits]:
        size = -(-numel * width // 8)
        plane = packed[start : start + size]
        if width < 8:
            parts = [(plane >> (i * width)) & (2**width - 1) for i in range(8 // width)]
            plane = torch.cat(parts)[:numel]
        codes = plane if codes is None else codes | (plane << shift)
        start, shift = start + size, shift + width
    assert codes is not None
    return codes


def quantise_reference(
    x: Tensor, bits: int, stochastic: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """See `quantise`."""
    levels = 2**bits - 1
    dtype = torch.promote_types(x.dtype, torch.float32)
    if x.numel() == 0:
        empty = x.new_zeros(x.shape[0], x.shape[2], dtype=dtype)
        return x.new_empty(0, dtype=torch.uint8), empty, empty.clone()
    limit = torch.finfo(dtype).max
    low, high = (t.to(dtype).nan_to_num(0, limit, -limit) for t in (x.amin(1), x.amax(1)))
    step = high / levels - low / levels
    inverse = torch.where(step > 0, 1 / step, 0).nan_to_num(0, 0, 0)
    # Truncation of what is half a step higher is rounding; of what is up to one, by chance.
    shift = 0.5 - low * inverse
    scaled = torch.addcmul(shift.unsqueeze(1), x.to(dtype), inverse.unsqueeze(1))
    if stochastic:
        scaled += torch.rand_like(scaled).sub_(0.5)
    return pack(scaled.clamp_(0, levels + 0.5).to(torch.uint8), bits), low, step


@torch.library.custom_op("razorctl::quantise", mutates_args=())
def quantise(x: Tensor, bits: int, stochastic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """A few-bit copy of `x` [blocks, rows, columns], a tile being a column of a block.

    Rounds to the nearest code, or if `stochastic` to one of the two with the mean kept, by the
    default generator. Returns the packed codes, uint8, and offset and step [blocks, columns] in
    single precision at least. A tile whose values are all equal, and zero where it is an end of
    its tile, are exact.
    """
    return quantise_reference(x, bits, stochastic)


@quantise.register_fake
def _(x: Tensor, bits: int, stochastic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    tile = x.new_empty(x.shape[0], x.shape[2], dtype=dtype)
    packed = x.new_empty(packed_bytes(x.numel(), bits), dtype=torch.uint8)
    return packed, tile, torch.empty_like(tile)


@torch.library.custom_op("razorctl::codes", mutates_args=())
def codes(packed: Tensor, shape: list[int], bits: int) -> Tensor:
    """The codes that `quantise` packed for an `x` of `shape`, uint8 of that shape."""
    unpacked = unpack(packed, bits, torch.Size(shape).numel()).view(shape)
    return unpacked.clone() if bits == 8 else unpacked  # which must not be the argument itself


@codes.register_fake
def _(packed: Tensor, shape: list[int], bits: int) -> Tensor:
    return packed.new_empty(shape)


def dequantise(
    packed: Tensor, offset: Tensor, step: Tensor, shape: torch.Size, bits: int, dtype: torch.dtype
) -> Tensor:
    """offset + step * code, for an `x` of `shape` [blocks, rows, columns], in `dtype`."""
    values = codes(packed, list(shape), bits).to(step.dtype)
    return torch.addcmul(offset.unsqueeze(1), values, step.unsqueeze(1)).to(dtype)
