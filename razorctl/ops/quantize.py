"""Few-bit copies: codes of 2 to 8 bits with a zero and a step for each tile.

A tile is one column of one block of rows. A value is step * (code - zero / 8), and the codes reach
from the least to the greatest value of their tile, with 2 bits not quite. Group-wise quantization
for the backward pass is ActNN's (Chen et al., 2021) and Mesa's (Pan et al., 2021); tiles are
columns here, because a GEMM that contracts rows can take the codes as they are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops.chunks import chunks

BITS = (8, 6, 5, 4, 3, 2)
LARGEST = 0.8  # that is told apart, as a share of the largest value of a dtype
PARTS = 8  # of a code, that a zero is a whole number of
FURTHEST = 32000 / PARTS  # from its codes that an int16 zero can lie
# Standard deviations that codes reach to either side. With 2 bits the many near the mean gain more
# than the few beyond lose; with more bits it was the other way round for every kind of layer.
CLIP = {2: 2.0}
# Widths that pack into bytes, of the lowest bits first.
PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}


WORD = 8  # bytes that are packed at once


def packed_bytes(numel: int, bits: int) -> int:
    """The size of `pack`'s result: below 8 bits, of a multiple of 64 codes."""
    return numel if bits == 8 else -(-numel // WORD**2) * WORD * bits


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes below 2 ** bits, of any shape -> uint8 [packed_bytes].

    A byte holds elements that lie far apart, so that every operation runs over long stretches, of
    eight bytes at once.
    """
    flat, planes, shift = codes.reshape(-1), [], 0
    if bits == 8:
        return flat.clone()
    missing = -flat.numel() % WORD**2
    words = (F.pad(flat, (0, missing)) if missing else flat).view(torch.int64)
    for width in PLANES[bits]:
        plane = words if width == bits else (words >> shift) & _in_each_byte(2**width - 1)
        first, *others = plane.view(8 // width, -1)
        packed = first.clone()
        for i, part in enumerate(others, start=1):
            packed |= part << i * width
        planes.append(packed)
        shift += width
    return (planes[0] if len(planes) == 1 else torch.cat(planes)).view(torch.uint8)


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """The inverse of `pack`: uint8 [numel]."""
    if bits == 8:
        return packed.clone()
    words, codes, start, shift = packed.view(torch.int64), None, 0, 0
    size = len(words) // bits
    for width in PLANES[bits]:
        plane = words[start : start + size * width]
        spread = words.new_empty(8 // width, size * width)
        for i, part in enumerate(spread):
            by = i * width - shift
            moved = plane if by == 0 else plane >> by if by > 0 else plane << -by
            torch.bitwise_and(moved, _in_each_byte(2**width - 1 << shift), out=part)
        codes = spread.view(-1) if codes is None else codes.bitwise_or_(spread.view(-1))
        start, shift = start + size * width, shift + width
    assert codes is not None
    return codes.view(torch.uint8)[:numel]


def _in_each_byte(mask: int) -> int:
    """A mask of 7 bits at most for every byte of a word."""
    return mask * 0x0101010101010101


def _scales_of(x: Tensor, bits: int, clip: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of each tile of `x`: `zero` as a float, step in bfloat16, and 1 / step."""
    levels = 2**bits - 1
    dtype = torch.promote_types(x.dtype, torch.float32)
    # Beyond that, rounding could carry what is restored out of range.
    limit = LARGEST * min(torch.finfo(x.dtype).max, torch.finfo(torch.float32).max)
    low, high = (t.to(dtype).nan_to_num(0).clamp(-limit, limit) for t in (x.amin(1), x.amax(1)))
    if clip:
        mean = x.mean(1, dtype=dtype)
        reach = CLIP[bits] * _deviation(x, mean)
        least, most = mean - reach, mean + reach
        low = torch.where(least.isfinite(), torch.maximum(low, least), low)
        high = torch.where(most.isfinite(), torch.minimum(high, most), high)
    # Never so fine that `zero` would not fit, and rounded up, so that the codes reach both ends.
    step = torch.maximum(high / levels - low / levels, torch.maximum(high, -low) / FURTHEST)
    step = (step * (1 + 2**-8)).to(torch.bfloat16)
    inverse = torch.where(step > 0, 1 / step.to(dtype), 0).nan_to_num(0, 0, 0)
    return (-low * inverse * PARTS).round_(), step, inverse


def _deviation(x: Tensor, mean: Tensor) -> Tensor:
    """The standard deviation of each tile."""
    squares = torch.zeros_like(mean)
    for block, *rows in chunks(x):
        part = x[(block, *rows)].to(mean.dtype) - mean[block].unsqueeze(1)
        squares[block] += part.square_().sum(1)
    return (squares / x.shape[1]).sqrt_()


def quantize_reference(
    x: Tensor, bits: int, stochastic: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """See `quantize`."""
    clip = bits in CLIP and not stochastic
    zero, step, inverse = _scales_of(x, bits, clip)
    scaled = x.to(inverse.dtype) * inverse.unsqueeze(1) + zero.unsqueeze(1) / PARTS
    noise = torch.rand_like(scaled) - 0.5 if stochastic else 0.0
    codes = (scaled + 0.5 + noise).clamp(0, 2**bits - 0.5)
    return pack(codes.to(torch.uint8), bits), zero.to(torch.int16), step


@torch.library.custom_op("razorctl::quantize", mutates_args=())
def quantize(x: Tensor, bits: int, stochastic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """A few-bit copy of `x` [blocks, rows, columns], a tile being a column of a block.

    Rounds to the nearest code, or if `stochastic` to one of the two with the mean kept, by the
    default generator. Returns the packed codes, uint8, and of every tile the code of the value 0,
    in eighths and int16, and the step, bfloat16, [blocks, columns]. A tile whose values are all
    equal is off by one in 2 ** 15 at most, and by nothing if they are 0. Magnitudes beyond LARGEST
    of the range of a dtype become that.
    """
    if x.numel() == 0:
        zero = x.new_zeros(x.shape[0], x.shape[2], dtype=torch.int16)
        return x.new_empty(0, dtype=torch.uint8), zero, zero.to(torch.bfloat16)
    clip = bits in CLIP and not stochastic
    zero, step, inverse = _scales_of(x, bits, clip)
    # Truncation of what is half a step higher is rounding; of what is up to one, by chance.
    shift = zero / PARTS if stochastic else zero / PARTS + 0.5
    # torch converts to int8 in half the time; all but 8 bits fit.
    dtype = torch.uint8 if bits == 8 else torch.int8
    codes = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    for block, *rows in chunks(x):
        part = x[(block, *rows)].to(inverse.dtype)
        part = torch.addcmul(shift[block].unsqueeze(1), part, inverse[block].unsqueeze(1))
        if stochastic:
            part += torch.rand_like(part)
        if stochastic or clip:  # only then can values lie beyond the codes
            part.clamp_(0, 2**bits - 0.5)
        codes[(block, *rows)] = part
    return pack(codes.view(torch.uint8), bits), zero.to(torch.int16), step


@quantize.register_fake
def _(x: Tensor, bits: int, stochastic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    zero = x.new_empty(x.shape[0], x.shape[2], dtype=torch.int16)
    packed = x.new_empty(packed_bytes(x.numel(), bits), dtype=torch.uint8)
    return packed, zero, torch.empty_like(zero, dtype=torch.bfloat16)


@torch.library.custom_op("razorctl::codes", mutates_args=())
def codes(packed: Tensor, shape: list[int], bits: int) -> Tensor:
    """The codes that `quantize` packed for an `x` of `shape`, uint8 of that shape."""
    return unpack(packed, bits, torch.Size(shape).numel()).view(shape)


@codes.register_fake
def _(packed: Tensor, shape: list[int], bits: int) -> Tensor:
    return packed.new_empty(shape)


def scales(zero: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Offset and step, in single precision, such that a value is offset + step * code."""
    step = step.float()
    return -zero / PARTS * step, step


def dequantize_reference(codes: Tensor, offset: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
    """See `dequantize`."""
    return torch.addcmul(offset.unsqueeze(-2), codes.to(step.dtype), step.unsqueeze(-2)).to(dtype)


@torch.library.custom_op("razorctl::dequantize", mutates_args=())
def dequantize(codes: Tensor, offset: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
    """offset + step * code in `dtype`, for codes [..., rows, columns] and scales [..., columns]."""
    values = torch.empty_like(codes, dtype=dtype, memory_format=torch.contiguous_format)
    for part in chunks(codes):
        tile = part[: codes.dim() - 2]
        scales = offset[tile].unsqueeze(-2), codes[part].to(step.dtype), step[tile].unsqueeze(-2)
        if dtype == step.dtype:
            torch.addcmul(*scales, out=values[part])
        else:
            values[part] = torch.addcmul(*scales)
    return values


@dequantize.register_fake
def _(codes: Tensor, offset: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)
