"""The base of norms with a weight and a bias per channel, of [batch, channels, ...].

Statistics are per channel over the batch (`batch_norm`), or per group of channels of one example
(`group_norm`). A rule sees x_hat as [pixels, channels]. As y = x_hat w + b, the codes of x_hat are
codes of y too. The norm offers them to the activation function or convolution that reads y.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from razorctl.layers.autocast import compute_dtype, no_autocast
from razorctl.layers.base import RazorLayer, save, saved
from razorctl.layers.fsdp import lasting
from razorctl.layers.once_differentiable import once_differentiable
from razorctl.layers.shared_copies import layouts
from razorctl.ops.images import memory_format
from razorctl.rules.dense import Dense
from razorctl.rules.packed import Packed
from razorctl.system.spans import packing


class ChannelNormFunction(torch.autograd.Function):
    """y = x_hat w + b, which is passed in; gradients from the packed x_hat."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: "ChannelNorm",
        y: Tensor,
        rstd: Tensor,
        packed: Packed | None,
    ) -> Tensor:
        ctx.layer, ctx.dtype, ctx.fixed = layer, x.dtype, layer.fixed
        save(ctx, weight, rstd, packed)
        if torch.compiler.is_compiling():  # torch 2.11 lets ReLU change no returned input
            return y.clone()
        ctx.mark_dirty(y)  # y becomes the output itself
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, rstd, packed = saved(ctx)
        mask = list(ctx.needs_input_grad[:3])
        # Before autocast is disabled: the tracer of a compiled program would leave it disabled.
        form = memory_format(dy)
        with no_autocast(dy.device):
            if ctx.fixed:
                x_hat = None if packed is None else images_as(packed, dy)
                gradients = _fixed_gradients(dy, x_hat, weight, rstd, mask)
            elif packed is None:
                gradients = None, None, _per_channel(dy) if mask[2] else None
            else:
                dy = dy.contiguous(memory_format=form)
                gradients = ctx.layer.gradients(dy, packed, weight, rstd, mask)
        dx, dw, db = (t if wanted else None for t, wanted in zip(gradients, mask, strict=True))
        dtype = None if weight is None else weight.dtype
        dx = None if dx is None else dx.to(ctx.dtype)
        dw, db = (None if t is None else t.to(dtype) for t in (dw, db))
        return dx, dw, db, None, None, None, None


def images_as(packed: Packed, dy: Tensor) -> Tensor:
    """The values of a copy, in the shape, dtype and memory format of `dy`."""
    return packed.images(dy.shape, dy.dtype, memory_format(dy))


def _per_channel(x: Tensor) -> Tensor:
    """The sum of each channel."""
    return x.sum([axis for axis in range(x.dim()) if axis != 1])


def _fixed_gradients(
    dy: Tensor, x_hat: Tensor | None, weight: Tensor | None, rstd: Tensor, mask: list[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, weight and bias if the statistics do not depend on x."""
    dx = dw = None
    if mask[0]:
        by = rstd if weight is None else rstd * weight.view(rstd.shape)
        dx = dy * by.to(dy.dtype)
    if mask[1]:
        assert x_hat is not None
        dw = _per_channel(dy * x_hat)
    return dx, dw, _per_channel(dy) if mask[2] else None


class ChannelNorm(RazorLayer):
    """Base of razor norms with a weight and a bias per channel."""

    kind: ClassVar[str] = "channel-norm"
    weight: Any  # Tensor or None
    bias: Any  # Tensor or None
    eps: float
    fixed = False  # whether the statistics do not depend on x

    def normalized(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The stock y of `x`, and the mean and 1 / std, each broadcastable to x.

        The statistics are in single precision at least. Updates running statistics as stock does.
        """
        raise NotImplementedError

    def gradients(
        self, dy: Tensor, packed: Packed, weight: Tensor | None, rstd: Tensor, mask: list[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, weight and bias, unless the statistics are `fixed`.

        Args:
            dy: the gradient of y.
            packed: the copy of x_hat.
            weight: one value per channel, or None.
            rstd: as `normalized` returns it.
            mask: which of the three gradients are wanted.
        """
        raise NotImplementedError

    def after(self, y: Tensor) -> Tensor:
        """The output of the stock class, given the normalized y."""
        return y

    def takes(self, x: Tensor) -> bool:
        """Whether this class computes the norm of `x`; otherwise the stock forward runs."""
        return self.saving and x.dim() > 1 and x.numel() > 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.takes(x):
            return self.stock(x)
        with torch.no_grad():
            y, mean, rstd = self.normalized(x.detach())
        copy = None
        by_weight = self.weight is not None and self.weight.requires_grad
        if by_weight or (x.requires_grad and not self.fixed):
            with packing(), torch.no_grad():
                copy = self.pack(x.detach(), mean, rstd)
        y = ChannelNormFunction.apply(x, self.weight, self.bias, self, y, rstd, copy)
        if copy is not None:
            self.offer(y, copy)
        return self.after(y)

    def pack(self, x: Tensor, mean: Tensor, rstd: Tensor) -> Packed:
        """The copy of x_hat."""
        dtype = compute_dtype(x)
        rule = self.rules.of(dtype)
        # The dense rule packs in the dtype that stock stores.
        dtype = x.dtype if isinstance(rule, Dense) else dtype
        return rule.pack_images(x, dtype, mean.flatten(1), rstd.flatten(1))

    @torch.no_grad()
    def offer(self, y: Tensor, copy: Packed) -> None:
        """Offers the codes of x_hat, with w and b, to the reader of y."""
        if self.memo is not None:
            of_y = copy.of_affine(self.weight, lasting(self.bias), compute_dtype(y))
            if of_y is not None:
                self.memo.offer(y, layouts.of_channels(y), of_y)


class WithActivation(ChannelNorm):
    """Base of timm's norms that end with the modules `drop` and `act`."""

    drop: Callable[[Tensor], Tensor]
    act: Callable[[Tensor], Tensor]

    def after(self, y: Tensor) -> Tensor:
        return self.act(self.drop(y))
