"""Maxima over windows of images, with the position of each in its window in a few bits.

Forward: y = max of each window of x [batch, channels, height, width]. Backward: dx of an element is
the sum of dy over the windows whose maximum it was.
"""

import math

import torch
from torch import Tensor

from razorctl.ops.images import memory_format
from razorctl.ops.op import op
from razorctl.ops.packing import BITS, pack, packed_bytes, unpack

aten = torch.ops.aten


def bits_for(geometry: list[int]) -> int:
    """The bits of a position in windows of a `geometry`; see `max_pool`."""
    return min(bits for bits in BITS if 2**bits >= math.prod(geometry[:2]))


def outputs(shape: torch.Size, geometry: list[int], ceil_mode: bool) -> torch.Size:
    """The shape of the output for images of `shape`."""
    sizes = []
    for size, kernel, stride, padding, dilation in zip(shape[2:], *_pairs(geometry), strict=True):
        room = size + 2 * padding - dilation * (kernel - 1) - 1
        count = (room + (stride - 1 if ceil_mode else 0)) // stride + 1
        # The last window starts inside the image or the padding before it.
        last = ceil_mode and (count - 1) * stride >= size + padding
        sizes.append(count - 1 if last else count)
    return torch.Size((*shape[:2], *sizes))


def _starts(index: Tensor, geometry: list[int]) -> tuple[Tensor, Tensor]:
    """The row [h, 1] and the column [w] of the input where each window starts."""
    _, _, *stride, top, left, _, _ = geometry
    height, width = (torch.arange(n, device=index.device) for n in index.shape[2:])
    return (height * stride[0] - top)[:, None], width * stride[1] - left


def _places(index: Tensor, shape: torch.Size, geometry: list[int]) -> Tensor:
    """Positions in windows, row by row, uint8 [planes, outputs], of the input's pixels `index`."""
    row, column = _starts(index, geometry)
    row = (index // shape[3] - row) // geometry[6]
    column = (index % shape[3] - column) // geometry[7]
    places: Tensor = row * geometry[1] + column
    return places.to(torch.uint8).flatten(2).flatten(0, 1)


def _indices(places: Tensor, shape: list[int], geometry: list[int]) -> Tensor:
    """The inverse of `_places`, for places in the shape of the output."""
    places = places.long()
    row, column = _starts(places, geometry)
    row = row + places // geometry[1] * geometry[6]
    column = column + places % geometry[1] * geometry[7]
    indices: Tensor = row * shape[3] + column
    return indices


def _empty(x: Tensor, geometry: list[int], ceil_mode: bool) -> tuple[Tensor, Tensor]:
    """The results of `max_pool`, without values."""
    shape = outputs(x.shape, geometry, ceil_mode)
    y = x.new_empty(shape).contiguous(memory_format=memory_format(x))
    size = packed_bytes(shape[0] * shape[1], shape[2] * shape[3], bits_for(geometry))
    return y, x.new_empty(size, dtype=torch.uint8)


@op(empty=_empty)
def max_pool(x: Tensor, geometry: list[int], ceil_mode: bool) -> tuple[Tensor, Tensor]:
    """The maxima of windows as torch computes them, and the packed codes of their positions.

    A position is the number of a pixel in its window, row by row, in `bits_for` bits. The codes
    [batch * channels, outputs] are packed.

    Args:
        x: [batch, channels, height, width].
        geometry: Height and width of the kernel, then of stride, padding and dilation.
        ceil_mode: As of `nn.MaxPool2d`.
    """
    y, index = aten.max_pool2d_with_indices(x, *_pairs(geometry), ceil_mode)
    return y, pack(_places(index, x.shape, geometry), bits_for(geometry))


@op(
    empty=lambda dy, packed, shape, *_: dy.new_empty(shape).contiguous(
        memory_format=memory_format(dy)
    )
)
def max_pool_grad(
    dy: Tensor, packed: Tensor, shape: list[int], geometry: list[int], ceil_mode: bool
) -> Tensor:
    """The gradient of the input of `max_pool`, in the memory format of `dy`.

    Args:
        dy: The gradient of the maxima.
        packed: The places that `max_pool` returned.
        shape: The shape of the input.
        geometry: As of `max_pool`.
        ceil_mode: As of `max_pool`.
    """
    planes = shape[0] * shape[1]
    places = unpack(packed, bits_for(geometry), planes, dy.shape[2] * dy.shape[3]).view(dy.shape)
    form = memory_format(dy)
    x = dy.new_empty(shape).contiguous(memory_format=form)  # only its shape is used
    index = _indices(places, shape, geometry).contiguous(memory_format=form)
    dx: Tensor = aten.max_pool2d_with_indices_backward(
        dy.contiguous(memory_format=form), x, *_pairs(geometry), ceil_mode, index
    )
    return dx


def _pairs(geometry: list[int]) -> list[list[int]]:
    return [geometry[i : i + 2] for i in (0, 2, 4, 6)]
