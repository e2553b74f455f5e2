"""Pooling: of a maximum its place in the window is saved, of a mean only the shape of the input.

Stock saves the input of either, and an index of 8 bytes for each maximum. The gradients are exact
whatever the rule.
"""

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from razorctl.layers.base import RazorLayer
from razorctl.ops.images import memory_format
from razorctl.ops.packing import BITS, pack, unpack
from razorctl.rules.base import Rule
from razorctl.spans import packing

aten = torch.ops.aten
PLACES = 256  # of a window, at most: a code has 8 bits


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


class MaxPoolFunction(torch.autograd.Function):
    """The stock maximum; the place of each in its window is saved in a few bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "RazorMaxPool2d") -> Tensor:
        ctx.geometry, ctx.like = layer.geometry, (x.shape, memory_format(x))
        y, index = F.max_pool2d_with_indices(x, *ctx.geometry)
        ctx.bits = min(b for b in BITS if 2**b >= math.prod(ctx.geometry[0]))
        with packing():
            ctx.save_for_backward(pack(_places(index, x.shape, ctx.geometry), ctx.bits))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        shape, form = ctx.like
        rows = shape[0] * shape[1]
        places = unpack(packed, ctx.bits, rows, dy.shape[2] * dy.shape[3]).view(dy.shape)
        index = _indices(places, shape, ctx.geometry)
        x = dy.new_empty(shape).contiguous(memory_format=form)  # its shape alone is asked for
        dy, index = dy.contiguous(memory_format=form), index.contiguous(memory_format=form)
        dx: Tensor = aten.max_pool2d_with_indices_backward(dy, x, *ctx.geometry, index)
        return dx, None


def _starts(index: Tensor, geometry: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """The row [h, 1] and the column [w] of the input where each window starts."""
    _, stride, padding, *_ = geometry
    height, width = (torch.arange(n, device=index.device) for n in index.shape[2:])
    return (height * stride[0] - padding[0])[:, None], width * stride[1] - padding[1]


def _places(index: Tensor, shape: torch.Size, geometry: tuple[Any, ...]) -> Tensor:
    """Places in windows, row by row, uint8 [planes, outputs]; index: of pixels of the input."""
    size, _, _, dilation, _ = geometry
    row, column = _starts(index, geometry)
    row = (index // shape[3] - row) // dilation[0]
    column = (index % shape[3] - column) // dilation[1]
    places: Tensor = row * size[1] + column
    return places.to(torch.uint8).flatten(2).flatten(0, 1)


def _indices(places: Tensor, shape: torch.Size, geometry: tuple[Any, ...]) -> Tensor:
    """The inverse of `_places`, for places of the shape of the output."""
    size, _, _, dilation, _ = geometry
    places = places.long()
    row, column = _starts(places, geometry)
    row = row + places // size[1] * dilation[0]
    column = column + places % size[1] * dilation[1]
    indices: Tensor = row * shape[3] + column
    return indices


class Pool(RazorLayer):
    """Base of razor pooling, of [batch, channels, height, width]."""

    kind: ClassVar[str] = "pool"

    def takes(self, x: Tensor) -> bool:
        """Whether the forward pass of `x` is that of this class; if not, it is the stock one."""
        return self.saving and x.requires_grad and x.dim() == 4 and x.numel() > 0


class RazorMaxPool2d(Pool, nn.MaxPool2d):
    """nn.MaxPool2d that saves 2 to 8 bits per output."""

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        assert isinstance(module, nn.MaxPool2d)
        return not module.return_indices and math.prod(_pair(module.kernel_size)) <= PLACES

    @property
    def geometry(self) -> tuple[Any, ...]:
        """Kernel size, stride, padding and dilation, each a pair, and whether sizes round up."""
        sizes = self.kernel_size, self.stride, self.padding, self.dilation
        return *map(_pair, sizes), self.ceil_mode

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor
        y = MaxPoolFunction.apply(input, self) if self.takes(input) else super().forward(input)
        return y


class MeanFunction(torch.autograd.Function):
    """A stock mean; its gradient needs the shape of its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "MeanPool") -> Tensor:
        ctx.layer, ctx.like = layer, (x.shape, memory_format(x))
        return layer.stock(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        shape, form = ctx.like
        x = dy.new_empty(shape).contiguous(memory_format=form)
        return ctx.layer.gradient(dy.contiguous(memory_format=form), x), None


class MeanPool(Pool):
    """Base of razor pooling that takes means."""

    def gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """The gradient of the input; x: a tensor of its shape, whatever is in it."""
        raise NotImplementedError

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = MeanFunction.apply(input, self) if self.takes(input) else self.stock(input)
        return y

    def stock(self, x: Tensor) -> Tensor:
        """The stock class's own forward."""
        y: Tensor = super().forward(x)
        return y


class RazorAvgPool2d(MeanPool, nn.AvgPool2d):
    """nn.AvgPool2d that saves nothing."""

    def gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        sizes = (_pair(size) for size in (self.kernel_size, self.stride, self.padding))
        options = self.ceil_mode, self.count_include_pad, self.divisor_override
        dx: Tensor = aten.avg_pool2d_backward(dy, x, *sizes, *options)
        return dx


class RazorAdaptiveAvgPool2d(MeanPool, nn.AdaptiveAvgPool2d):
    """nn.AdaptiveAvgPool2d that saves nothing. Of one output a channel, stock saves nothing too."""

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return module.output_size not in (1, (1, 1), [1, 1])

    def gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        dx: Tensor = aten._adaptive_avg_pool2d_backward(dy, x)
        return dx


SWAPS: dict[type[nn.Module], type[RazorLayer]] = {
    nn.MaxPool2d: RazorMaxPool2d,
    nn.AvgPool2d: RazorAvgPool2d,
    nn.AdaptiveAvgPool2d: RazorAdaptiveAvgPool2d,
}
