"""nn.Linear that saves its input by a rule; the input gradient and bias gradient stay exact."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from razorctl.layers import WeightLayer, flat, no_autocast, to_compute_dtype
from razorctl.rules import Rule


class LinearFunction(torch.autograd.Function):
    """y = x W^T + b with dW from what `rule` kept of x (Back Razor, Sec. 3; CVPR 2024, Alg. 1)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: "RazorLinear",
        rule: Rule,
        p: float,
        *kept: Tensor,
    ) -> Tensor:
        ctx.layer, ctx.rule, ctx.p, ctx.shape = layer, rule, p, x.shape
        # Autocast saves a low-precision copy of the weight; the parameter itself costs nothing.
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, *kept)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        rows = torch.Size((ctx.shape[:-1].numel(), ctx.shape[-1]))
        dy = flat(dy)
        dx = dw = db = None
        # Gradients in dy's dtype are cast to their parameter's by the engine, as in stock.
        with no_autocast(dy.device):
            # First, so that a restored input is gone before dX, which is as large, is made.
            if ctx.needs_input_grad[1]:
                dw = ctx.layer.weight_grad(ctx.rule, lambda x: dy.T @ x, tuple(kept), rows, ctx.p)
            if ctx.needs_input_grad[2]:
                db = dy.sum(0)
            if ctx.needs_input_grad[0]:
                dx = (dy @ weight.to(dy.dtype)).view(ctx.shape)
        return dx, dw, db, *[None] * (3 + len(kept))


class RazorLinear(WeightLayer, nn.Linear):
    """nn.Linear that saves its input by `rule`, or nothing of it while its block is not drawn."""

    kind: ClassVar[str] = "linear"

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        assert isinstance(module, nn.Linear)
        return module.in_features

    def forward(self, input: Tensor) -> Tensor:
        if not self.saving:
            return super().forward(input)
        x = to_compute_dtype(input)
        weight, p, rule, kept = self.keep(input, (self.kind, x.dtype), lambda: flat(x.detach()))
        y: Tensor = LinearFunction.apply(x, weight, self.bias, self, rule, p, *kept)
        return y


SWAPS = {nn.Linear: RazorLinear}
