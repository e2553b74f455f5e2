"""Pooling: a maximum stores its position in the window, a mean stores only a shape.

Stock stores the input of either, and an index of 8 bytes per maximum. The gradients are exact
whatever the rule.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from razorctl.layers.base import RazorLayer, Swaps
from razorctl.layers.once_differentiable import once_differentiable
from razorctl.ops.images import memory_format
from razorctl.ops.pool import max_pool, max_pool_grad
from razorctl.rules.base import Rule
from razorctl.system.spans import packing

aten = torch.ops.aten
PLACES = 256  # positions in a window, at most: a code has 8 bits


def _sizes(size: Any, axes: int) -> tuple[int, ...]:
    return (size,) * axes if isinstance(size, int) else tuple(size)


class MaxPoolFunction(torch.autograd.Function):
    """The stock maximum; its position in the window is stored in a few bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "MaxPool") -> Tensor:
        ctx.geometry, ctx.like = layer.geometry, (x.shape, memory_format(x))
        with packing():
            y, places = max_pool(x, *ctx.geometry)
        ctx.save_for_backward(places)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        shape, form = ctx.like
        dy = dy.contiguous(memory_format=form)
        return max_pool_grad(dy, places, list(shape), *ctx.geometry), None


class Pool(RazorLayer):
    """Base of razor pooling, of [batch, channels, ...] with `axes` more axes."""

    kind: ClassVar[str] = "pool"
    kernel_size: Any
    stride: Any
    padding: Any
    ceil_mode: bool

    @property
    def axes(self) -> int:
        """The number of axes of a window."""
        return 3 if isinstance(self, (nn.AvgPool3d, nn.AdaptiveAvgPool3d)) else 2

    def takes(self, x: Tensor) -> bool:
        """Whether this class pools `x`; otherwise the stock forward runs."""
        rank = 2 + self.axes
        return self.saving and x.requires_grad and x.dim() == rank and x.numel() > 0


class MaxPool(Pool):
    """A maximum that stores 2 to 8 bits per output."""

    dilation: Any

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        assert isinstance(module, nn.MaxPool2d)
        places = math.prod(_sizes(module.kernel_size, 2))
        return not module.return_indices and places <= PLACES

    @property
    def geometry(self) -> tuple[list[int], bool]:
        """The arguments of `ops.pool.max_pool`: sizes per axis, and `ceil_mode`."""
        sizes = self.kernel_size, self.stride, self.padding, self.dilation
        return [n for size in sizes for n in _sizes(size, self.axes)], self.ceil_mode

    def forward(self, input: Tensor) -> Tensor:
        if not self.takes(input):
            return self.stock(input)
        y: Tensor = MaxPoolFunction.apply(input, self)
        return y


class MeanFunction(torch.autograd.Function):
    """A stock mean; its gradient needs only the shape of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "AvgPool") -> Tensor:
        ctx.layer, ctx.like = layer, (x.shape, memory_format(x))
        return layer.stock(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        shape, form = ctx.like
        x = dy.new_empty(shape).contiguous(memory_format=form)
        return ctx.layer.gradient(dy.contiguous(memory_format=form), x), None


class AvgPool(Pool):
    """A mean over windows; it stores nothing."""

    count_include_pad: bool
    divisor_override: int | None

    def gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        """The gradient of the input; x: a tensor of the input's shape, with any values."""
        sizes = (_sizes(size, self.axes) for size in (self.kernel_size, self.stride, self.padding))
        options = self.ceil_mode, self.count_include_pad, self.divisor_override
        backward: Any = aten.avg_pool2d_backward if self.axes == 2 else aten.avg_pool3d_backward
        dx: Tensor = backward(dy, x, *sizes, *options)
        return dx

    def forward(self, input: Tensor) -> Tensor:
        if not self.takes(input):
            return self.stock(input)
        y: Tensor = MeanFunction.apply(input, self)
        return y


class AdaptiveAvgPool(AvgPool):
    """A mean over windows that give an output of a fixed size; it stores nothing.

    For one output value per channel, the stock class stores nothing either.
    """

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return set(_sizes(module.output_size, 1)) != {1}

    def gradient(self, dy: Tensor, x: Tensor) -> Tensor:
        of_images: Any = aten._adaptive_avg_pool2d_backward
        dx: Tensor = (of_images if self.axes == 2 else aten._adaptive_avg_pool3d_backward)(dy, x)
        return dx


SWAPS: Swaps = {
    nn.MaxPool2d: MaxPool,
    nn.AvgPool2d: AvgPool,
    nn.AvgPool3d: AvgPool,
    nn.AdaptiveAvgPool2d: AdaptiveAvgPool,
    nn.AdaptiveAvgPool3d: AdaptiveAvgPool,
}
