"""LayerNorm and RMSNorm that save their normalised input by a rule."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from razorctl.layers import RazorLayer, no_autocast, to_compute_dtype


class NormFunction(torch.autograd.Function):
    """y = x_hat w + b, the stock forward, with gradients from what the rule keeps of x_hat.

    With g = w dy: dx = (g - mean(g) - x_hat mean(g x_hat)) / std, without mean(g) where the norm
    does not centre; dw = sum dy x_hat; db is exact. Back Razor prunes the raw input. x_hat has
    zero mean, so that what is left out is small, and gives the better gradient at equal size.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: "Norm"
    ) -> Tensor:
        y = layer.stock(x)
        ctx.layer, ctx.shape = layer, x.shape
        kept: tuple[Tensor, ...] = ()
        scale = None
        if any(ctx.needs_input_grad[:2]):
            normalised, scale = layer.normalise(x)
            # The dense rule keeps what stock autocast keeps: norms run in single precision.
            kept = layer.rule.keep(
                to_compute_dtype(normalised) if layer.rule.prunes else normalised
            )
        ctx.save_for_backward(weight, scale, *kept)
        return y

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
                if ctx.needs_input_grad[1]:
                    dw = (dy * x).sum(0).view(weight.shape)
                if ctx.needs_input_grad[0]:
                    g = dy.to(scale.dtype)
                    g = g if weight is None else g * weight.reshape(-1)
                    along = (g * x).mean(1, keepdim=True)
                    if ctx.layer.centres:
                        g = g - g.mean(1, keepdim=True)
                    dx = torch.addcmul(g, x, along, value=-1).mul_(scale).view(ctx.shape)
        return dx, dw, db, None


class Norm(RazorLayer):
    """Base of razor norms over the last axes: what they normalise by."""

    kind: ClassVar[str] = "norm"
    centres: ClassVar[bool] = True
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
        y: Tensor = NormFunction.apply(x, self.weight, getattr(self, "bias", None), self)
        return y

    def stock(self, x: Tensor) -> Tensor:
        """The stock class's own forward."""
        y: Tensor = super().forward(x)
        return y

    def normalise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x_hat [rows, columns] and 1 / std [rows, 1], in single precision at least."""
        x = x.reshape(-1, self.columns(self))
        dtype = torch.promote_types(x.dtype, torch.float32)
        eps = torch.finfo(dtype).eps if self.eps is None else self.eps
        x = x.to(dtype)
        if self.centres:
            x = x - x.mean(1, keepdim=True)
        mean_square = torch.linalg.vector_norm(x, dim=1, keepdim=True).square() / x.shape[1]
        scale = torch.rsqrt(mean_square + eps)
        return x * scale, scale


class RazorLayerNorm(Norm, nn.LayerNorm):
    """nn.LayerNorm that saves its normalised input by `rule`."""


class RazorRMSNorm(Norm, nn.RMSNorm):
    """nn.RMSNorm that saves its normalised input by `rule`."""

    centres: ClassVar[bool] = False


SWAPS = {nn.LayerNorm: RazorLayerNorm, nn.RMSNorm: RazorRMSNorm}
