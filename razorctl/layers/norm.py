"""LayerNorm and RMSNorm that save their normalized input by a rule."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from razorctl.layers.autocast import no_autocast, to_compute_dtype
from razorctl.layers.base import RazorLayer, flat, save, saved
from razorctl.layers.sharing import Copy
from razorctl.ops.norm import statistics
from razorctl.rules.base import Rule, Shareable
from razorctl.rules.dense import Dense
from razorctl.spans import packing


class NormFunction(torch.autograd.Function):
    """y = x_hat w + b, the stock forward, with gradients from what the rule packs of x_hat.

    See `ops.norm.norm_grad_reference`; db is exact. Back Razor prunes the raw input. x_hat of a
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
        rstd: Tensor | None,
        copy: Copy | None,
    ) -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        ctx.rule, packed = copy or (None, None)
        save(ctx, weight, rstd, packed)
        return layer.stock(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, dy), None, None, None


class FusedNormFunction(torch.autograd.Function):
    """`NormFunction` where one operation computes y and makes the copy of x_hat.

    Returns y and the tensors of the copy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: "Norm",
        rule: Any,
        dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:
        ctx.layer, ctx.shape, ctx.rule = layer, x.shape, rule
        with packing():
            y, rstd, *tensors = rule.pack_norm(
                x, weight, bias, layer.epsilon(x), layer.centers, dtype
            )
        save(ctx, weight, rstd, rule.copy(flat(x).shape, rstd.dtype, *tensors))
        ctx.mark_non_differentiable(*tensors)
        return y, *tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *nothing: Any) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, dy), None, None, None


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of input, weight and bias."""
    weight, rstd, packed = saved(ctx)
    layer, needed = ctx.layer, ctx.needs_input_grad
    dx = dw = db = None
    dy = dy.reshape(-1, layer.columns(layer))
    with no_autocast(dy.device):
        if any(needed[:2]):
            columns = None if weight is None else weight.reshape(-1)
            dx, dw, db = ctx.rule.norm_grad(dy, packed, columns, rstd, layer.centers)
        elif needed[2]:
            db = dy.sum(0)
    return (
        dx.view(ctx.shape) if dx is not None and needed[0] else None,
        dw.view(weight.shape) if dw is not None and needed[1] else None,
        db.view(layer.normalized_shape) if db is not None and needed[2] else None,
    )


class Norm(RazorLayer):
    """Base of razor norms, which normalize over the last axes.

    centers: whether the norm subtracts the mean. plain: whether the stock forward is that of
    `F.layer_norm`, or of `F.rms_norm`.
    """

    kind: ClassVar[str] = "norm"
    centers: ClassVar[bool] = True
    plain: bool = False
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
        bias, copy, rstd = getattr(self, "bias", None), None, None
        if not (x.requires_grad or (self.weight is not None and self.weight.requires_grad)):
            y: Tensor = NormFunction.apply(x, self.weight, bias, self, rstd, copy)
            return y
        dtype = torch.promote_types(x.dtype, torch.float32)
        rule = self.rules.of(to_compute_dtype(x.new_empty(0, dtype=dtype)))
        one_axis = self.plain and len(self.normalized_shape) == 1
        if one_axis and isinstance(rule, Shareable) and rule.fuses:
            with torch.no_grad():
                stock = self.stock(x.new_empty(0, x.shape[-1]))  # for its dtype
            y, *tensors = FusedNormFunction.apply(x, self.weight, bias, self, rule, stock.dtype)
            copy = Copy(rule, rule.copy(flat(x).shape, dtype, *tensors))
        else:
            with packing():
                rstd, copy = self.pack(x, rule)
            y = NormFunction.apply(x, self.weight, bias, self, rstd, copy)
        self.offer(y, copy)
        return y

    def epsilon(self, x: Tensor) -> float:
        """`eps`, or its default for the dtype that x is normalized in."""
        eps: float | None = self.eps
        dtype = torch.promote_types(x.dtype, torch.float32)
        return torch.finfo(dtype).eps if eps is None else eps

    @torch.no_grad()
    def pack(self, x: Tensor, rule: Rule) -> tuple[Tensor, Copy]:
        """1 / std [rows, 1] and the copy of x_hat."""
        rows = x.detach().reshape(-1, self.columns(self))
        mean, rstd = statistics(rows, self.epsilon(x), self.centers)
        x_hat = (rows if mean is None else rows - mean) * rstd
        # The dense rule packs what stock autocast saves: norms run in single precision.
        x_hat = x_hat if isinstance(rule, Dense) else to_compute_dtype(x_hat)
        return rstd, Copy(rule, rule.pack(x_hat))

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


class RazorLayerNorm(Norm, nn.LayerNorm):
    """nn.LayerNorm that saves its normalized input by a rule."""

    plain = True


class RazorRMSNorm(Norm, nn.RMSNorm):
    """nn.RMSNorm that saves its normalized input by a rule."""

    centers = False
    plain = True


SWAPS = {nn.LayerNorm: RazorLayerNorm, nn.RMSNorm: RazorRMSNorm}
