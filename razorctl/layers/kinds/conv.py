"""Convolutions that store their input by a rule; dx and db stay exact.

A convolution with patches that do not overlap, such as a patch embedding, is a linear layer on
patches: a column is a value of a patch. In any other convolution a column is an input channel.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from razorctl.layers.autocast import no_autocast, to_compute_dtype
from razorctl.layers.base import Swaps, WeightLayer, flat, save, saved
from razorctl.layers.once_differentiable import once_differentiable
from razorctl.layers.shared_copies import layouts
from razorctl.layers.shared_copies.memo import copy_of, copy_of_images
from razorctl.ops.cast import cast_weight
from razorctl.ops.images import as_they_lie, memory_format, unrolled
from razorctl.rules.base import Rule
from razorctl.rules.packed import Packed

convolution_backward = torch.ops.aten.convolution_backward
TRANSPOSED = F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d  # by number of axes


class ConvFunction(torch.autograd.Function):
    """The stock convolution, with dW from the packed x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: "Conv",
        p: float,
        packed: Packed | None,
    ) -> Tensor:
        ctx.layer, ctx.p, ctx.shape = layer, p, x.shape
        # Backward gets the input's memory format, as in stock: not every kernel takes every format.
        ctx.memory_format = memory_format(x)
        save(ctx, weight if ctx.needs_input_grad[0] else None, packed)
        return layer.convolve(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, packed = saved(ctx)
        layer: Conv = ctx.layer
        shape, form = ctx.shape, ctx.memory_format
        dx = dw = db = None

        def product(x: Tensor | Packed) -> Tensor:
            nonlocal dx, db
            if layer.rows_of_patches(dy, shape, form):
                rows = x.values() if isinstance(x, Packed) else x
                return flat(dy.movedim(1, -1)).T @ rows
            if not isinstance(x, Packed):  # some of the channels; without dx
                images = unrolled(x, shape).contiguous(memory_format=form)
                return layer.gradients(dy, images)[1].flatten(0, -2)
            # On a CPU one call for all gradients is faster; a GPU would hold more at once.
            with_input = weight if dy.device.type == "cpu" else None
            images = x.images(shape, x.dtype, form)
            dx, grad, db = layer.gradients(dy, images, with_input, layer.bias is not None)
            return grad

        with no_autocast(dy.device):
            if weight is not None:
                weight = cast_weight(weight, dy.dtype)
            if ctx.needs_input_grad[1]:
                products = [product(x) for x in packed.operands()]
                dw = layer.fold(layer.weight_grad(packed, products, ctx.p))
            if not ctx.needs_input_grad[2]:
                db = None
            elif db is None:
                db = dy.sum((0, *range(2, dy.dim())))
            if ctx.needs_input_grad[0] and dx is None:
                like = dy.new_empty(1).expand(shape)  # only its shape is read
                mask = [True, False, False]
                dx, *_ = convolution_backward(dy, like, weight, None, *layer.geometry, mask)
        return dx, dw, db, None, None, None


class Conv(WeightLayer):
    """Base of razor convolutions.

    If a joint budget does not draw the weight in a step, no input is stored.
    """

    kind: ClassVar[str] = "conv"
    transposed: bool
    in_channels: int
    out_channels: int
    groups: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    bias: Tensor | None
    _conv_forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        channels: int = module.in_channels  # type: ignore[assignment]
        return channels

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        conv: Any = module
        uneven = any(d * (k - 1) % 2 for d, k in zip(conv.dilation, conv.kernel_size, strict=True))
        return (
            conv.padding_mode == "zeros"
            and not (conv.padding == "same" and uneven)
            # With groups, a subset of the input channels does not form a smaller convolution.
            and (conv.groups == 1 or rule.elementwise)
        )

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The stock convolution of `x`."""
        return self._conv_forward(x, weight, bias)

    def forward(self, input: Tensor) -> Tensor:
        if not self.saving or input.dim() != len(self.kernel_size) + 2:
            return self.stock(input)
        return self.sparse(input)

    def sparse(self, input: Tensor) -> Tensor:
        """The stock convolution, storing `input` by a rule."""
        x = to_compute_dtype(input)
        layout = layouts.of_patches(x.dtype, self.patch)
        weight, p, copy = self.pack(input, x, layout)
        weight = self.convolved(weight)
        y: Tensor = ConvFunction.apply(x, weight, self.bias, self, p, copy)
        return y

    def convolved(self, weight: Tensor) -> Tensor:
        """The kernel of the convolution, computed from the parameter `weight`."""
        return weight

    @property
    def patch(self) -> tuple[int, ...] | None:
        """The size of the patches that are packed as rows; None if a row is a pixel."""
        return None

    def copy_rows(self, input: Tensor, x: Tensor) -> Packed:
        """The copy of images [batch, channels, ...] as rows [pixels, channels]."""
        return copy_of_images(x.detach(), self.rules)

    def rows_of_patches(self, dy: Tensor, shape: torch.Size, form: torch.memory_format) -> bool:
        """Whether dW is computed as by a linear layer on patches; shape, form: of the input."""
        return False

    def gradients(
        self, dy: Tensor, images: Tensor, weight: Tensor | None = None, bias: bool = False
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """The gradients of images, of the weight as `unfold` returns it, and of the bias.

        Args:
            dy: the gradient of the output.
            images: the input, or some of its channels.
            weight: None for no gradient of images.
            bias: whether the gradient of the bias is wanted.
        """
        # The view sets new strides: a single channel's strides would always mean channels-last.
        images, mask = images.view(images.shape), [weight is not None, True, bias]
        if weight is None:
            weight = dy.new_empty(1).expand(self.weight_shape(images.shape[1]))
        sizes = [self.out_channels] if bias else None
        dx, dw, db = convolution_backward(dy, images, weight, sizes, *self.geometry, mask)
        return dx, self.unfold(dw), db

    def weight_shape(self, columns: int) -> tuple[int, ...]:
        """The shape of the weight for this number of input channels."""
        out, _, *size = self.weight.shape
        return out, columns // self.groups, *size

    def unfold(self, dw: Tensor) -> Tensor:
        """dW of some channels, as a view with these channels as the last axis."""
        return dw.movedim(1, -1)

    def fold(self, dw: Tensor) -> Tensor:
        """A dW as `product` returns it, in the shape of the weight."""
        out, _, *size = self.weight.shape
        return dw.view(out, *size, -1).movedim(-1, 1)

    @property
    def geometry(self) -> tuple[Any, ...]:
        """The arguments of aten::convolution_backward from the stride to the groups."""
        if isinstance(self.padding, str):
            same = self.padding == "same"
            sizes = zip(self.dilation, self.kernel_size, strict=True)
            padding = tuple(d * (k - 1) // 2 if same else 0 for d, k in sizes)
        else:
            padding = tuple(self.padding)
        options = self.transposed, self.output_padding, self.groups
        return self.stride, padding, self.dilation, *options


class Conv2d(Conv):
    """A convolution of images or volumes; it may be one of patches."""

    @classmethod
    def rule_kind(cls, module: nn.Module) -> str:
        # The patch embedding of a transformer; its input is small.
        return "patch" if _by_patches(module) and not _pointwise(module) else Conv.kind

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        assert isinstance(module, (nn.Conv2d, nn.Conv3d))
        return module.in_channels * (math.prod(module.kernel_size) if _by_patches(module) else 1)

    @property
    def patch(self) -> tuple[int, ...] | None:
        return self.kernel_size if _by_patches(self) and not _pointwise(self) else None

    def copy_rows(self, input: Tensor, x: Tensor) -> Packed:
        if self.patch is None:
            return super().copy_rows(input, x)
        return copy_of(self.patches(x.detach()), self.rules)

    def patches(self, x: Tensor) -> Tensor:
        """Images [batch, channels, ...] as rows [patches, values of a patch]."""
        batch, channels, *image = x.shape
        cut, split = [slice(None), slice(None)], [batch, channels]
        for size, kernel in zip(image, self.kernel_size, strict=True):
            cut.append(slice(size // kernel * kernel))
            split += [size // kernel, kernel]
        axes = range(2, len(split), 2)
        patches = x[tuple(cut)].reshape(split).permute(0, *axes, 1, *(axis + 1 for axis in axes))
        return patches.reshape(-1, channels * math.prod(self.kernel_size))

    def rows_of_patches(self, dy: Tensor, shape: torch.Size, form: torch.memory_format) -> bool:
        # If the kernels read images as they lie, the rows of dy would be a copy.
        lie = self.patch is None and as_they_lie(dy.device, shape, form)
        return _by_patches(self) and not lie

    def fold(self, dw: Tensor) -> Tensor:
        return dw.view_as(self.weight) if _by_patches(self) else super().fold(dw)


def _by_patches(module: Any) -> bool:
    """Whether the columns of a convolution are the values of its disjoint patches."""
    axes = len(module.kernel_size)
    plain: bool = (
        module.stride == module.kernel_size
        and module.padding in ((0,) * axes, "valid")
        and module.dilation == (1,) * axes
        and module.groups == 1
    )
    return plain


def _pointwise(module: Any) -> bool:
    """Whether the kernel covers a single pixel."""
    return set(module.kernel_size) == {1}


class ConvTranspose(Conv):
    """A transposed convolution; its weight is [in, out / groups, ...]."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if output_size is None:
            return super().forward(input)
        # Then the padding of the output depends on the shape of the input.
        return self.stock(input, output_size)

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        options = self.stride, self.padding, self.output_padding, self.groups, self.dilation
        function: Any = TRANSPOSED[len(self.kernel_size) - 1]
        y: Tensor = function(x, weight, bias, *options)
        return y

    def weight_shape(self, columns: int) -> tuple[int, ...]:
        return columns, *self.weight.shape[1:]

    def unfold(self, dw: Tensor) -> Tensor:
        return dw.flatten(1).T

    def fold(self, dw: Tensor) -> Tensor:
        return dw.T.view_as(self.weight)


SWAPS: Swaps = {
    nn.Conv1d: Conv,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv2d,
    nn.ConvTranspose1d: ConvTranspose,
    nn.ConvTranspose2d: ConvTranspose,
    nn.ConvTranspose3d: ConvTranspose,
}
