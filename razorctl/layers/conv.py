"""nn.Conv2d that saves its input by a rule; the input gradient and bias gradient stay exact.

A convolution whose patches do not overlap, such as a patch embedding, is a linear layer on patches:
its columns are the values of a patch. The columns of any other convolution are its input channels.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_input, conv2d_weight

from razorctl.layers.autocast import cast_weight, no_autocast, to_compute_dtype
from razorctl.layers.base import WeightLayer, flat, save, saved
from razorctl.layers.sharing import Copy
from razorctl.rules.base import Product, Rule


class Conv2dFunction(torch.autograd.Function):
    """The stock convolution with dW from what was packed of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: "RazorConv2d",
        p: float,
        copy: Copy | None,
    ) -> Tensor:
        ctx.layer, ctx.p, ctx.shape = layer, p, x.shape
        ctx.rule, packed = copy or (None, None)
        # Backward gets the memory format of the input, as in stock: not every kernel takes any.
        last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        ctx.memory_format = torch.channels_last if last else torch.contiguous_format
        save(ctx, weight if ctx.needs_input_grad[0] else None, packed)
        y: Tensor = layer._conv_forward(x, weight, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, packed = saved(ctx)
        layer = ctx.layer
        dx = dw = db = None
        with no_autocast(dy.device):
            if ctx.needs_input_grad[1]:
                product = layer.product(dy, ctx.shape, ctx.memory_format)
                dw = layer.fold(layer.weight_grad(ctx.rule, product, packed, ctx.p))
            if ctx.needs_input_grad[2]:
                db = dy.sum((0, 2, 3))
            if ctx.needs_input_grad[0]:
                dx = conv2d_input(ctx.shape, cast_weight(weight, dy.dtype), dy, *layer.geometry)  # type: ignore[no-untyped-call]
        return dx, dw, db, None, None, None


class RazorConv2d(WeightLayer, nn.Conv2d):
    """nn.Conv2d that saves its input by a rule.

    It saves no input in a step in which a joint budget does not draw its weight.
    """

    kind: ClassVar[str] = "conv"

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        assert isinstance(module, nn.Conv2d)
        return module.in_channels * (math.prod(module.kernel_size) if _by_patches(module) else 1)

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        assert isinstance(module, nn.Conv2d)
        uneven = any(
            d * (k - 1) % 2 for d, k in zip(module.dilation, module.kernel_size, strict=True)
        )
        return (
            module.padding_mode == "zeros"
            and not (module.padding == "same" and uneven)
            # With groups, some of the input channels do not make a smaller convolution.
            and (module.groups == 1 or rule.elementwise)
        )

    def forward(self, input: Tensor) -> Tensor:
        if not self.saving or input.dim() != 4:
            return super().forward(input)
        x = to_compute_dtype(input)
        layout = self.kind, x.dtype, self.kernel_size if _by_patches(self) else None
        weight, p, copy = self.pack(input, layout, lambda: self.rows(x.detach()))
        y: Tensor = Conv2dFunction.apply(x, weight, self.bias, self, p, copy)
        return y

    def rows(self, x: Tensor) -> Tensor:
        """A batch of images as rows: [patches, values of a patch], or [pixels, channels].

        x: [batch, channels, height, width].
        """
        if not _by_patches(self):
            return flat(x.movedim(1, -1))
        batch, channels, *image = x.shape
        (kh, kw), (h, w) = (
            self.kernel_size,
            (n // k for n, k in zip(image, self.kernel_size, strict=True)),
        )
        patches = x[:, :, : h * kh, : w * kw].reshape(batch, channels, h, kh, w, kw)
        return patches.permute(0, 2, 4, 1, 3, 5).reshape(-1, channels * kh * kw)

    def product(self, dy: Tensor, shape: torch.Size, memory_format: torch.memory_format) -> Product:
        """The product that maps columns of `rows(x)` to their columns of dW, for x of `shape`.

        memory_format: that of the images which the stock kernel gets.
        """
        batch, _, height, width = shape
        if _by_patches(self):
            outputs = flat(dy.movedim(1, -1))
            return Product(lambda x: outputs.T @ x)

        def multiply(x: Tensor) -> Tensor:
            image = x.view(batch, height, width, x.shape[1]).movedim(-1, 1)
            image = image.contiguous(memory_format=memory_format)
            # The view sets new strides: those of a single channel would always mean channels-last.
            image = image.view(image.shape)
            size = (self.out_channels, image.shape[1] // self.groups, *self.kernel_size)
            dw: Tensor = conv2d_weight(image, size, dy, *self.geometry)  # type: ignore[no-untyped-call]
            return dw.movedim(1, -1).flatten(0, 2)

        return Product(multiply)

    def fold(self, dw: Tensor) -> Tensor:
        """dW as `product` returns it, in the shape of the weight."""
        if _by_patches(self):
            return dw.view_as(self.weight)
        return dw.view(self.out_channels, *self.kernel_size, -1).movedim(-1, 1)

    @property
    def geometry(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
        """Stride, padding, dilation and groups."""
        if isinstance(self.padding, str):
            same = self.padding == "same"
            sizes = zip(self.dilation, self.kernel_size, strict=True)
            padding = tuple(d * (k - 1) // 2 if same else 0 for d, k in sizes)
        else:
            padding = tuple(self.padding)
        return self.stride, padding, self.dilation, self.groups


def _by_patches(module: nn.Conv2d) -> bool:
    return (
        module.stride == module.kernel_size
        and module.padding in ((0, 0), "valid")
        and module.dilation == (1, 1)
        and module.groups == 1
    )


SWAPS = {nn.Conv2d: RazorConv2d}
