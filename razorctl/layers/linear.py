"""nn.Linear that saves its input by a rule; the input gradient and bias gradient stay exact."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from razorctl.layers import RazorLayer, no_autocast, to_compute_dtype


class LinearFunction(torch.autograd.Function):
    """y = x W^T + b with dW from what `rule` keeps of x (Back Razor, Sec. 3; CVPR 2024, Alg. 1)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: "RazorLinear", p: float
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        kept = layer.rule.keep(rows) if ctx.needs_input_grad[1] else ()
        ctx.layer, ctx.p, ctx.rows_shape, ctx.x_shape = layer, p, rows.shape, x.shape
        # Autocast saves a low-precision copy of the weight; the parameter itself costs nothing.
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, *kept)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1])
        dx = dw = db = None
        # Gradients in dy's dtype are cast to their parameter's by the engine, as in stock.
        with no_autocast(dy.device):
            if ctx.needs_input_grad[0]:
                dx = (dy @ weight.to(dy.dtype)).view(ctx.x_shape)
            if ctx.needs_input_grad[1]:
                dw = ctx.layer.rule.weight_grad(dy, tuple(kept), ctx.rows_shape)
                if ctx.layer.blocks is not None:
                    dw = ctx.layer.blocks.observe(ctx.layer.block, ctx.p, dw)
            if ctx.needs_input_grad[2]:
                db = dy.sum(0)
        return dx, dw, db, None, None


class RazorLinear(RazorLayer, nn.Linear):
    """nn.Linear that saves its input by `rule`, or nothing of it while its block is not drawn."""

    kind: ClassVar[str] = "linear"

    @staticmethod
    def columns(module: nn.Module) -> int:
        assert isinstance(module, nn.Linear)
        return module.in_features

    def forward(self, input: Tensor) -> Tensor:
        if not self.saving:
            return super().forward(input)
        weight: Tensor = self.weight
        p = 1.0
        if self.blocks is not None:
            p = self.blocks.drawn.get(self.block, 0.0)
            weight = weight if p else weight.detach()
        y: Tensor = LinearFunction.apply(to_compute_dtype(input), weight, self.bias, self, p)
        return y


SWAPS = {nn.Linear: RazorLinear}
