"""The pixel classifier of a segmentation model; its logits are upsampled a few images at a time.

Such a model ends in a 1x1 convolution, whose logits are upsampled bilinearly to the size of the
labels. Upsampled logits are often the largest activations of a step, and most steps need only
their cross-entropy. So the convolution returns `Pixels`, a tensor whose `F.interpolate` returns
`Enlarged`, a lazy tensor (`lazy_tensor`) that holds the logits before upsampling. Its
`F.cross_entropy` upsamples a part of the images at a time.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from razorctl.layers.autocast import no_autocast
from razorctl.layers.heads.lazy_tensor import COMMON, Lazy, LazyLayer, check_versions
from razorctl.layers.kinds.conv import Conv2d
from razorctl.layers.once_differentiable import once_differentiable
from razorctl.ops.pixel_cross_entropy import (
    part_images,
    pixel_cross_entropy,
    upsample,
    upsample_backward,
)


class Enlargement(NamedTuple):
    """The arguments of aten::upsample_bilinear2d, and the dtype of the result."""

    size: torch.Size
    dtype: torch.dtype
    align_corners: bool
    scale_h: float | None
    scale_w: float | None


def _losses(
    options: tuple[Enlargement, int, float],
    parts: tuple[Tensor],
    target: Tensor,
    factor: Tensor | None,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """The losses of upsampled logits, and the gradient of the logits before."""
    (x,), (way, ignore_index, smoothing), (gradient,) = parts, options, needed
    scales = way.align_corners, way.scale_h, way.scale_w
    return pixel_cross_entropy(x, target, *scales, ignore_index, smoothing, factor, gradient)


class EnlargedFunction(torch.autograd.Function):
    """Upsampled logits as `Enlarged`, with the stock gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Enlargement, dtype: torch.dtype) -> Tensor:
        ctx.way, ctx.dtype, ctx.shape = way, x.dtype, x.shape
        return Enlarged((*x.shape[:2], *way.size), dtype, x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        size, dtype, *options = ctx.way
        with no_autocast(dy.device):
            dx = upsample_backward(dy.to(dtype), size, ctx.shape, *options)
        return dx.to(ctx.dtype), None, None


class PixelsFunction(torch.autograd.Function):
    """Logits as `Pixels`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return Pixels(x.shape, x.dtype, x.device)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class Enlarged(Lazy):
    """Upsampled logits [batch, classes, height, width]; the part is x [batch, classes, h, w]."""

    function = EnlargedFunction
    losses = staticmethod(_losses)
    axes = 4


class Pixels(Lazy):
    """Logits [batch, classes, h, w] that may be upsampled; their values are computed already."""

    FACTS = frozenset({Tensor.__hash__})

    @property
    def pending(self) -> bool:
        return self.node is self.origin


def pixels_of(x: Tensor) -> Pixels:
    """Logits `x` as `Pixels`."""
    pixels: Pixels = PixelsFunction.apply(x)
    pixels.computed, pixels.origin, pixels.reached = x, pixels.node, pixels.node
    return pixels


def _interpolate(
    func: Any,
    pixels: Pixels,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor | None:
    """Bilinear `F.interpolate`; None for another mode or where its deterministic kernel runs."""
    x = pixels.values()
    plain = x.dim() == 4 and mode == "bilinear" and not (recompute_scale_factor or antialias)
    if not plain or (not x.is_cpu and torch.are_deterministic_algorithms_enabled()):
        return None
    one = func(x.detach()[:1, :1], size, scale_factor, mode, align_corners)
    scales = scale_factor if isinstance(scale_factor, (list, tuple)) else [scale_factor] * 2
    way = Enlargement(one.shape[2:], one.dtype, bool(align_corners), *scales)
    make = partial(_upsampled, x, way)
    return Enlarged.of((x,), (way,), way.dtype, partial(check_versions, (x, x._version)), make)


def _upsampled(x: Tensor, way: Enlargement) -> Tensor:
    size, dtype, *options = way
    with no_autocast(x.device):
        y: Tensor = upsample(x.to(dtype), size, *options)
    return y


def _mapped(func: Any, pixels: Pixels, *args: Any, **kwargs: Any) -> Tensor:
    """A cast of logits, or a sum of two."""
    args = tuple(arg.values() if isinstance(arg, Pixels) else arg for arg in args)
    return pixels_of(func(pixels.values(), *args, **kwargs))


def _argmax(func: Any, logits: Enlarged, dim: int | None = None) -> Tensor | None:
    """The class of the largest logit per pixel, upsampling a part of the images at a time."""
    if dim not in (1, -3):
        return None
    logits.check()
    (x,), (way,) = logits.parts, logits.options
    parts = torch.split(x.detach(), part_images(x.shape[1], way.size))
    return torch.cat([_upsampled(part, way).argmax(1) for part in parts])


Enlarged.LAZY = {
    **COMMON,
    **dict.fromkeys((Tensor.argmax, torch.argmax), _argmax),
}
Pixels.LAZY = {
    **dict.fromkeys((Tensor.add, Tensor.__add__, torch.add), _mapped),
    **dict.fromkeys((Tensor.float, Tensor.to), _mapped),
    F.interpolate: _interpolate,
}


class PixelHead(LazyLayer, Conv2d):
    """A pixel classifier; its cross-entropy never holds all upsampled logits.

    It stores its input by the rule of a 1x1 convolution, dense under methods without one.
    """

    kind: ClassVar[str] = LazyLayer.kind

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return pixels_of(y) if self.defers else y


def pixel_classifiers(model: nn.Module) -> frozenset[nn.Module]:
    """The layers that may classify pixels.

    If the last layer is a 1x1 convolution: all 1x1 convolutions with as many output channels. For
    one that does not classify nothing changes, since its output is not upsampled.
    """
    layers = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    width = layers[-1].out_channels if layers and _pointwise(layers[-1]) else None
    return frozenset(m for m in layers if _pointwise(m) and m.out_channels == width)


def _pointwise(layer: Any) -> bool:
    plain = type(layer) is nn.Conv2d or isinstance(layer, PixelHead)
    return plain and layer.kernel_size == (1, 1)
