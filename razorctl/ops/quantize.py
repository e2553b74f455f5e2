"""Few-bit copies: codes of 2 to 8 bits with a zero point and a scale for each tile.

A tile is one column of one block of rows. A value is scale * (code - zero_point / 8). The codes
cover their tile from its least to its greatest value; 2-bit codes cover less (CLIP). Group-wise
quantization for the backward pass is from ActNN (Chen et al., 2021) and Mesa (Pan et al., 2021).
Tiles are columns here, so that the rows of a column, which a weight gradient contracts, share a
scale.
"""

import torch
from torch import Tensor

from razorctl.ops.chunks import chunks
from razorctl.ops.packing import pack, packed_bytes, packed_of, unpacked
from razorctl.ops.random import uniform

LARGEST = 0.8  # the largest magnitude of a code, as a share of the largest value of a dtype
PARTS = 8  # a zero point is a whole number of these parts of a code
FURTHEST = 32000 / PARTS  # codes: the largest distance of an int16 zero point from its codes
# Bits -> standard deviations that codes reach to either side of the mean. With 2 bits, the many
# values near the mean gain more than the few beyond lose; with more bits, the loss was larger for
# every kind of layer.
CLIP = {2: 2.0}


def _scales_of(x: Tensor, bits: int, clip: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The zero point as a float, the scale in bfloat16, and 1 / scale, of each tile of `x`."""
    levels = 2**bits - 1
    dtype = torch.promote_types(x.dtype, torch.float32)
    # Beyond this limit, rounding could move unpacked values out of range.
    limit = LARGEST * min(torch.finfo(x.dtype).max, torch.finfo(torch.float32).max)
    low, high = (t.to(dtype).nan_to_num(0).clamp(-limit, limit) for t in (x.amin(1), x.amax(1)))
    if clip:
        mean = x.mean(1, dtype=dtype)
        reach = CLIP[bits] * _deviation(x, mean)
        least, most = mean - reach, mean + reach
        low = torch.where(least.isfinite(), torch.maximum(low, least), low)
        high = torch.where(most.isfinite(), torch.minimum(high, most), high)
    # The scale is never so fine that a zero point would not fit, and is rounded up, so that codes
    # reach both ends.
    scale = torch.maximum(high / levels - low / levels, torch.maximum(high, -low) / FURTHEST)
    scale = (scale * (1 + 2**-8)).to(torch.bfloat16)
    inverse = torch.where(scale > 0, 1 / scale.to(dtype), 0).nan_to_num(0, 0, 0)
    return (-low * inverse * PARTS).round_(), scale, inverse


def _deviation(x: Tensor, mean: Tensor) -> Tensor:
    """The standard deviation of each tile."""
    squares = torch.zeros_like(mean)
    for block, *rows in chunks(x):
        part = x[(block, *rows)].to(mean.dtype) - mean[block].unsqueeze(1)
        squares[block] += part.square_().sum(1)
    return (squares / x.shape[1]).sqrt_()


def quantize_reference(
    x: Tensor, bits: int, seed: Tensor | None = None, offset: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """See `quantize`."""
    zero_point, scale, inverse = _scales_of(x, bits, clip=bits in CLIP and seed is None)
    scaled = x.to(inverse.dtype) * inverse.unsqueeze(1) + zero_point.unsqueeze(1) / PARTS
    noise = 0.5 if seed is None else uniform(seed, offset, scaled.numel()).view(scaled.shape)
    codes = (scaled + noise).clamp(0, 2**bits - 0.5)
    return pack(codes.to(torch.uint8), bits), zero_point.to(torch.int16), scale


@torch.library.custom_op("razorctl::quantize", mutates_args=())
def quantize(
    x: Tensor, bits: int, seed: Tensor | None = None, offset: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """A few-bit copy of `x` [blocks, rows, columns]; a tile is a column of a block.

    Rounds to the nearest code. With a `seed` (0-dim, int64) it rounds to one of the two nearest
    codes at random, without bias; element i takes number `offset` + i of `random.uniform`. Returns
    the packed codes, uint8, and for each tile, [blocks, columns], the zero point, which is the code
    of the value 0 in eighths, int16, and the scale, bfloat16. If all values of a tile are equal,
    their relative error is at most 2 ** -15, and 0 for the value 0. Magnitudes above LARGEST of the
    largest value of the dtype become that.
    """
    if x.numel() == 0:
        zero_point = x.new_zeros(x.shape[0], x.shape[2], dtype=torch.int16)
        return x.new_empty(0, dtype=torch.uint8), zero_point, zero_point.to(torch.bfloat16)
    clip = bits in CLIP and seed is None
    zero_point, scale, inverse = _scales_of(x, bits, clip)
    # Truncation rounds to nearest after adding 1/2, and at random after adding a random number.
    shift = zero_point / PARTS + (0.5 if seed is None else 0.0)
    # torch converts to int8 in half the time; all codes but those of 8 bits fit.
    dtype = torch.uint8 if bits == 8 else torch.int8

    def codes(part: tuple[slice, ...]) -> Tensor:
        block = part[:1]
        values = x[part].to(inverse.dtype)
        values = torch.addcmul(shift[block].unsqueeze(1), values, inverse[block].unsqueeze(1))
        if seed is not None:
            values += uniform(seed, offset + _position(x, part), values.numel()).view(values.shape)
        if seed is not None or clip:  # only then can values lie beyond the codes
            values.clamp_(0, 2**bits - 0.5)
        return values.to(dtype).view(torch.uint8)

    return packed_of(x, bits, codes), zero_point.to(torch.int16), scale


def _position(x: Tensor, part: tuple[slice, ...]) -> int:
    """The number of elements of `x` before a part."""
    _, rows, columns = x.shape
    block, row = (*(s.start for s in part), 0)[:2]
    return int((block * rows + row) * columns)


@quantize.register_fake
def _(
    x: Tensor, bits: int, seed: Tensor | None = None, offset: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    zero_point = x.new_empty(x.shape[0], x.shape[2], dtype=torch.int16)
    packed = x.new_empty(packed_bytes(x.shape, bits), dtype=torch.uint8)
    return packed, zero_point, torch.empty_like(zero_point, dtype=torch.bfloat16)


def affine(zero_point: Tensor, scale: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Offset and scale [blocks, columns], in single precision: a value is offset + scale * code."""
    scale = scale.float()
    offset = -zero_point / PARTS * scale
    return offset if bias is None else offset + bias, scale


def dequantize_reference(
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    rows: int,
    dtype: torch.dtype,
) -> Tensor:
    """See `dequantize`."""
    offset, scale = affine(zero_point, scale, bias)
    shape = len(scale), rows, scale.shape[1]
    values = torch.empty(shape, dtype=scale.dtype, device=packed.device)
    for part, codes in unpacked(packed, bits, shape):
        values[part] = codes.to(scale.dtype)
    return torch.addcmul(offset.unsqueeze(1), values, scale.unsqueeze(1)).to(dtype)


@torch.library.custom_op("razorctl::dequantize", mutates_args=())
def dequantize(
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    rows: int,
    dtype: torch.dtype,
) -> Tensor:
    """scale * (code - zero_point / 8) + bias in `dtype`, [blocks, rows, columns].

    packed, zero_point: as `quantize` returns them for that shape. scale: [blocks, columns], of any
    floating dtype. bias: [columns], None for 0.
    """
    offset, scale = affine(zero_point, scale, bias)
    shape = len(scale), rows, scale.shape[1]
    values = torch.empty(shape, dtype=dtype, device=packed.device)
    for part, codes in unpacked(packed, bits, shape):
        values[part] = widened(codes, offset, scale, part)
    return values


@dequantize.register_fake
def _(
    packed: Tensor,
    zero_point: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    rows: int,
    dtype: torch.dtype,
) -> Tensor:
    return packed.new_empty(len(scale), rows, scale.shape[1], dtype=dtype)


def widened(codes: Tensor, offset: Tensor, scale: Tensor, part: tuple[slice, ...]) -> Tensor:
    """offset + scale * code, for the codes of one part."""
    tile = part[:1]
    o, s = offset[tile].unsqueeze(1), scale[tile].unsqueeze(1)
    return torch.addcmul(o, codes.to(s.dtype), s)
