"""LayerNorm and RMSNorm that save their normalized input by a rule."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from razorctl.layers.autocast import no_autocast, to_compute_dtype
from razorctl.layers.base import RazorLayer
from razorctl.rules.base import Kept
from razorctl.rules.dense import Dense
from razorctl.spans import packing

aten = torch.ops.aten


class NormFunction(torch.autograd.Function):
    """y = x_hat w + b, the stock forward, with gradients from what the rule keeps of x_hat.

    With g = w dy: dx = (g - mean(g) - x_hat mean(g x_hat)) / std, without mean(g) where the norm
    does not center; dw = sum dy x_hat; db is exact. Back Razor prunes the raw input. x_hat has
    zero mean, so that what is left out is small, and gives the better gradient at equal size.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: "Norm",
        scale: Tensor | None,
        *kept: Tensor,
    ) -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        ctx.save_for_backward(weight, scale, *kept)
        return layer.stock(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, *kept = ctx.saved_tensors
        dx = dw = db = None
        columns = ctx.layer.columns(ctx.layer)
        dy = dy.reshape(-1, columns)
        with no_autocast(dy.device):
            if ctx.needs_input_grad[2]:
                db = dy.sum(0).view(ctx.layer.normalized_shape)
            if any(ctx.needs_input_grad[:2]):
                x = ctx.layer.rule.restore(tuple(kept), dy.shape).to(scale.dtype)
                dx, dw = ctx.layer.gradients(dy, x, weight, ctx.needs_input_grad[:2])
                if dw is not None:
                    dw = dw.view(weight.shape)
                if dx is not None:
                    dx = dx.mul_(scale).view(ctx.shape)
        return dx, dw, db, *[None] * (2 + len(kept))


class Norm(RazorLayer):
    """Base of razor norms over the last axes: what they normalize by."""

    kind: ClassVar[str] = "norm"
    centers: ClassVar[bool] = True
    normalized_shape: tuple[int, ...]
    weight: Any  # Tensor or None
    eps: Any  # float, or None for that of the dtype that it computes in

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        shape: tuple[int, ...] = module.normalized_shape  # type: ignore[assignment]
        return torch.Size(shape).numel()

    def forward(self, x: Tensor) -> Tensor:
        if not self.saving:
            return self.stock(x)
        with packing():
            scale, kept = self.keep(x)
        y: Tensor = NormFunction.apply(
            x, self.weight, getattr(self, "bias", None), self, scale, *kept
        )
        if kept:
            self.offer(y, kept)
        return y

    @torch.no_grad()
    def keep(self, x: Tensor) -> tuple[Tensor | None, Kept]:
        """1 / std and what is kept of x_hat, if a gradient needs them."""
        if not (x.requires_grad or (self.weight is not None and self.weight.requires_grad)):
            return None, ()
        normalized, scale = self.normalize(x.detach())
        # The dense rule keeps what stock autocast keeps: norms run in single precision.
        if not isinstance(self.rule, Dense):
            normalized = to_compute_dtype(normalized)
        return scale, self.rule.keep(normalized)

    @torch.no_grad()
    def offer(self, y: Tensor, kept: Kept) -> None:
        """Codes of x_hat are codes of y too, which the linear layers that it feeds can take."""
        if self.memo is not None and len(self.normalized_shape) == 1:
            like = to_compute_dtype(y.new_empty(0))
            of_y = self.rule.affine(kept, self.weight, getattr(self, "bias", None), like)
            if of_y is not None:
                self.memo.offer(y, ("linear", like.dtype), self.rule, of_y)

    def stock(self, x: Tensor) -> Tensor:
        """The stock class's own forward."""
        y: Tensor = super().forward(x)
        return y

    def normalize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x_hat [rows, columns] and 1 / std [rows, 1], in single precision at least."""
        x = x.reshape(-1, self.columns(self))
        dtype = torch.promote_types(x.dtype, torch.float32)
        eps = torch.finfo(dtype).eps if self.eps is None else self.eps
        x = x.to(dtype)
        if self.centers:
            normalized, _, scale = torch.native_layer_norm(x, x.shape[1:], None, None, eps)
            return normalized, scale
        mean_square = torch.linalg.vector_norm(x, dim=1, keepdim=True).square() / x.shape[1]
        scale = torch.rsqrt(mean_square + eps)
        return x * scale, scale

    def gradients(
        self, dy: Tensor, x: Tensor, weight: Tensor | None, needed: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """std dx [rows, columns] and dw [columns], as needed, from dy and x_hat [rows, columns]."""
        g, weight = dy.to(x.dtype), None if weight is None else weight.reshape(-1).to(x.dtype)
        if self.centers:  # x_hat is its own normalized input, with mean 0 and deviation 1
            mean = x.new_zeros(len(x), 1)
            dx, dw, _ = aten.native_layer_norm_backward(
                g.contiguous(), x, x.shape[1:], mean, mean + 1, weight, None, [*needed, False]
            )
            return dx if needed[0] else None, dw if needed[1] else None
        dw = (dy * x).sum(0) if needed[1] else None
        if not needed[0]:
            return None, dw
        g = g if weight is None else g * weight
        return torch.addcmul(g, x, (g * x).mean(1, keepdim=True), value=-1), dw


class RazorLayerNorm(Norm, nn.LayerNorm):
    """nn.LayerNorm that saves its normalized input by `rule`."""


class RazorRMSNorm(Norm, nn.RMSNorm):
    """nn.RMSNorm that saves its normalized input by `rule`."""

    centers: ClassVar[bool] = False


SWAPS = {nn.LayerNorm: RazorLayerNorm, nn.RMSNorm: RazorRMSNorm}
