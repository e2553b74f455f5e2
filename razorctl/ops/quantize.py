"""Few-bit copies: codes of 2 to 8 bits, with a zero point and a scale per tile.

Forward, for x [rows, columns]: scale = (max - min) / (2^bits - 1) and zero_point = round(-8 min /
scale) of each tile, code = round(x / scale + zero_point / 8). Backward: x = scale * (code -
zero_point / 8) + bias. A tile is some consecutive rows of one column. Codes cover the range from
the least to the greatest value of their tile; 2-bit codes cover less (CLIP). Group-wise
quantization for the backward pass is from ActNN (Chen et al., 2021) and Mesa (Pan et al., 2021).
Tiles are columns here, because columns of activations differ more than rows do.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from razorctl.ops.chunks import RowPart, parts
from razorctl.ops.op import FewBitCopy, Fused, op
from razorctl.ops.packing import packed_bytes, packed_of, unpacked
from razorctl.ops.random import uniform

LARGEST = 0.8  # the largest magnitude in a copy, as a share of the largest value of a dtype
PARTS = 8  # zero points count in this fraction of a code
FURTHEST = 32000 / PARTS  # the largest distance, in codes, of an int16 zero point from its codes
# Bits -> standard deviations that codes cover to either side of the mean. With 2 bits, the many
# values near the mean gain more than the few outside lose. With more bits, the loss was larger in
# every kind of layer.
CLIP = {2: 2.0}


@cache
def limit(dtype: torch.dtype) -> float:
    """The largest magnitude in a copy of a dtype, so that no unpacked value is out of range."""
    return LARGEST * min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def tile_count(rows: int, tile_rows: int) -> int:
    """The number of tiles in a column."""
    return -(-rows // tile_rows)


def in_tiles(x: Tensor, part: RowPart) -> Tensor:
    """Values [rows, columns] of a part as [tiles, rows of a tile, columns]."""
    return x.view(part.tiles.stop - part.tiles.start, -1, x.shape[1])


def _of_each_tile(reduce: Callable[[Tensor], Tensor], x: Tensor, tile_rows: int) -> Tensor:
    """`reduce`, from [tiles, rows, columns] to [tiles, columns], applied to each tile of x."""
    whole = len(x) // tile_rows * tile_rows
    results = [reduce(x[:whole].view(-1, tile_rows, x.shape[1]))] if whole else []
    if whole < len(x):
        results.append(reduce(x[whole:].unsqueeze(0)))
    return torch.cat(results) if len(results) > 1 else results[0]


def _scales_of(x: Tensor, bits: int, tile_rows: int, clip: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The zero point as a float, the scale in bfloat16, and 1 / scale, of each tile of `x`."""
    levels = 2**bits - 1
    dtype = torch.promote_types(x.dtype, torch.float32)
    end = limit(x.dtype)
    low, high = (
        _of_each_tile(reduce, x, tile_rows).to(dtype).nan_to_num(0).clamp(-end, end)
        for reduce in (lambda tile: tile.amin(1), lambda tile: tile.amax(1))
    )
    if clip:
        mean = _of_each_tile(lambda tile: tile.mean(1, dtype=dtype), x, tile_rows)
        reach = CLIP[bits] * _deviation(x, mean, tile_rows)
        least, most = mean - reach, mean + reach
        low = torch.where(least.isfinite(), torch.maximum(low, least), low)
        high = torch.where(most.isfinite(), torch.minimum(high, most), high)
    # The scale is coarse enough for the zero point to fit, and rounded up, so that codes reach both
    # ends.
    scale = torch.maximum(high / levels - low / levels, torch.maximum(high, -low) / FURTHEST)
    scale = (scale * (1 + 2**-8)).to(torch.bfloat16)
    inverse = torch.where(scale > 0, 1 / scale.to(dtype), 0).nan_to_num(0, 0, 0)
    return (-low * inverse * PARTS).round_(), scale, inverse


def _deviation(x: Tensor, mean: Tensor, tile_rows: int) -> Tensor:
    """The standard deviation of each tile."""
    squares, count = torch.zeros_like(mean), torch.full_like(mean[:, :1], tile_rows)
    for part in parts(len(x), x.shape[1], tile_rows, x.device):
        values = in_tiles(x[part.rows].to(mean.dtype), part) - mean[part.tiles].unsqueeze(1)
        squares[part.tiles] += values.square_().sum(1)
    count[-1] -= len(mean) * tile_rows - len(x)
    return (squares / count).sqrt_()


def _normalized(x: Tensor, mean: Tensor | None, rstd: Tensor | None) -> Tensor:
    """(x - mean) * rstd; without rstd x itself, and without a mean x * rstd."""
    if rstd is None:
        return x
    return (x if mean is None else x - mean) * rstd


def empty_copy(
    x: Tensor, rows: int, columns: int, bits: int, tile_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `quantize` for [rows, columns], without values, on the device of `x`."""
    packed = x.new_empty(packed_bytes(rows, columns, bits), dtype=torch.uint8)
    zero_point = x.new_empty(tile_count(rows, tile_rows), columns, dtype=torch.int16)
    return packed, zero_point, torch.empty_like(zero_point, dtype=torch.bfloat16)


@op(
    empty=lambda x, bits, tile_rows, *_: empty_copy(x, x.shape[0], x.shape[1], bits, tile_rows),
    fused=Fused(reduces=True),
)
def quantize(
    x: Tensor,
    bits: int,
    tile_rows: int,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A few-bit copy of `x`, or of (x - mean) * rstd.

    Returns the packed codes, uint8; and per tile, [tiles, columns], the zero point, int16, which is
    the code of the value 0 in eighths, and the scale, bfloat16. If all values of a tile are equal,
    their relative error is at most 2 ** -15, and 0 for the value 0. Larger magnitudes than LARGEST
    of the dtype's largest value are clipped to it.

    Args:
        x: [rows, columns].
        bits: Bits of a code.
        tile_rows: Rows of a tile; the last tile may be shorter.
        mean: [rows, 1], None for 0.
        rstd: [rows, 1]; if it is None, x itself is copied.
        seed: 0-dim, int64. With a seed, x is rounded at random to one of the two nearest codes,
          without bias: element i by number i of `random.uniform`. Without one, x is rounded to
          the nearest code.
    """
    if x.numel() == 0:
        shape = tile_count(len(x), tile_rows), x.shape[1]
        zero_point = x.new_zeros(shape, dtype=torch.int16)
        return x.new_empty(0, dtype=torch.uint8), zero_point, zero_point.to(torch.bfloat16)
    x, clip = _normalized(x, mean, rstd), bits in CLIP and seed is None
    zero_point, scale, inverse = _scales_of(x, bits, tile_rows, clip)
    # Truncation rounds to nearest after adding 1/2, and at random after adding a random number.
    shift = zero_point / PARTS + (0.5 if seed is None else 0.0)
    # torch converts to int8 in half the time; codes of fewer than 8 bits fit.
    dtype = torch.uint8 if bits == 8 else torch.int8

    def codes(part: RowPart) -> Tensor:
        tile = part.tiles
        values = in_tiles(x[part.rows].to(inverse.dtype), part)
        values = torch.addcmul(shift[tile].unsqueeze(1), values, inverse[tile].unsqueeze(1))
        values = values.flatten(0, 1)
        if seed is not None:
            start = part.rows.start * x.shape[1]
            values += uniform(seed, start, values.numel()).view(values.shape)
        return values.clamp_(0, 2**bits - 0.5).to(dtype).view(torch.uint8)

    return packed_of(x, bits, tile_rows, codes), zero_point.to(torch.int16), scale


def affine(copy: FewBitCopy) -> tuple[Tensor, Tensor]:
    """Offset and scale [tiles, columns], in single precision: a value is offset + scale * code."""
    scale = copy.scale.float()
    offset = -copy.zero_point / PARTS * scale
    return offset if copy.bias is None else offset + copy.bias, scale


@op(
    empty=lambda copy, rows, dtype: copy.packed.new_empty(rows, copy.scale.shape[1], dtype=dtype),
    fused=Fused(),
)
def dequantize(copy: FewBitCopy, rows: int, dtype: torch.dtype) -> Tensor:
    """The values [rows, columns] of a copy, in `dtype`."""
    offset, scale = affine(copy)
    values = torch.empty(rows, scale.shape[1], dtype=dtype, device=scale.device)
    for part, codes in unpacked(copy, rows):
        values[part.rows] = widened(codes, offset, scale, part)
    return values


def widened(codes: Tensor, offset: Tensor, scale: Tensor, part: RowPart) -> Tensor:
    """offset + scale * code for the codes of a part."""
    o, s = offset[part.tiles].unsqueeze(1), scale[part.tiles].unsqueeze(1)
    return torch.addcmul(o, in_tiles(codes.to(s.dtype), part), s).flatten(0, 1)
