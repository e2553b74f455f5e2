"""LayerNorm and RMSNorm that save their normalized input by a rule."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from razorctl.layers.autocast import no_autocast, to_compute_dtype
from razorctl.layers.base import RazorLayer, save, saved
from razorctl.layers.sharing import Copy
from razorctl.rules.base import Shareable
from razorctl.rules.dense import Dense
from razorctl.spans import packing

aten = torch.ops.aten


class NormFunction(torch.autograd.Function):
    """y = x_hat w + b, the stock forward, with gradients from what the rule packs of x_hat.

    With g = w dy: dx = (g - mean(g) - x_hat mean(g x_hat)) / std, without mean(g) where the norm
    does not center; dw = sum dy x_hat; db is exact. Back Razor prunes the raw input. x_hat of a
    LayerNorm has mean 0, so that the pruned elements are small, and it gives the better gradient
    from the same number of bytes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: "Norm",
        scale: Tensor | None,
        copy: Copy | None,
    ) -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        ctx.rule, packed = copy or (None, None)
        save(ctx, weight, scale, packed)
        return layer.stock(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, scale, packed = saved(ctx)
        dx = dw = db = None
        columns = ctx.layer.columns(ctx.layer)
        dy = dy.reshape(-1, columns)
        with no_autocast(dy.device):
            if ctx.needs_input_grad[2]:
                db = dy.sum(0).view(ctx.layer.normalized_shape)
            if any(ctx.needs_input_grad[:2]):
                x = ctx.rule.unpack(packed).to(scale.dtype)
                dx, dw = ctx.layer.gradients(dy, x, weight, ctx.needs_input_grad[:2])
                if dw is not None:
                    dw = dw.view(weight.shape)
                if dx is not None:
                    dx = dx.mul_(scale).view(ctx.shape)
        return dx, dw, db, None, None, None


class Norm(RazorLayer):
    """Base of razor norms, which normalize over the last axes.

    centers: whether the norm subtracts the mean.
    """

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
            scale, copy = self.pack(x)
        bias = getattr(self, "bias", None)
        y: Tensor = NormFunction.apply(x, self.weight, bias, self, scale, copy)
        if copy is not None:
            self.offer(y, copy)
        return y

    @torch.no_grad()
    def pack(self, x: Tensor) -> tuple[Tensor | None, Copy | None]:
        """1 / std [rows, 1] and the copy of x_hat; None for both if no gradient needs them."""
        if not (x.requires_grad or (self.weight is not None and self.weight.requires_grad)):
            return None, None
        normalized, scale = self.normalize(x.detach())
        narrow = to_compute_dtype(normalized)
        rule = self.rules.of(narrow)
        # The dense rule packs what stock autocast saves: norms run in single precision.
        return scale, Copy(rule, rule.pack(normalized if isinstance(rule, Dense) else narrow))

    @torch.no_grad()
    def offer(self, y: Tensor, copy: Copy) -> None:
        """Offers the codes of x_hat, with w and b, to the linear layers that y feeds."""
        rule = copy.rule
        if (
            self.memo is not None
            and isinstance(rule, Shareable)
            and len(self.normalized_shape) == 1
        ):
            like = to_compute_dtype(y.new_empty(0))
            of_y = rule.of_affine(copy.packed, self.weight, getattr(self, "bias", None), like)
            self.memo.offer(y, ("linear", like.dtype), Copy(rule, of_y))

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
        """dx times std [rows, columns] and dw [columns], from dy and x_hat [rows, columns].

        needed: which of the two to compute; the other is None.
        """
        g, weight = dy.to(x.dtype), None if weight is None else weight.reshape(-1).to(x.dtype)
        if self.centers:  # normalizing x_hat gives x_hat: its mean is 0, its deviation 1
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
    """nn.LayerNorm that saves its normalized input by a rule."""


class RazorRMSNorm(Norm, nn.RMSNorm):
    """nn.RMSNorm that saves its normalized input by a rule."""

    centers: ClassVar[bool] = False


SWAPS = {nn.LayerNorm: RazorLayerNorm, nn.RMSNorm: RazorRMSNorm}
