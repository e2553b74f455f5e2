"""nn.Linear that saves its input by a rule, with GEMMs of its backward pass in int8 where wanted.

Without them the input gradient and bias gradient are exact; the bias gradient is anyway.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from razorctl.layers.autocast import no_autocast, to_compute_dtype
from razorctl.layers.base import Settings, WeightLayer, flat
from razorctl.ops.activation import activation_to_int8
from razorctl.ops.int8 import scaled_gemm, to_int8
from razorctl.rules.base import Product, Rule


class Gemm(Product):
    """x -> dy^T x for dy [rows, out], in int8 or in the precision of dy."""

    def __init__(self, dy: Tensor, int8: bool) -> None:
        super().__init__(lambda x: dy.T @ x)
        self.dy, self.int8 = dy, int8
        self._total: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """dy summed over rows, [out]: the gradient of a bias."""
        if self._total is None:
            self._total = self.dy.sum(0)
        return self._total

    def __call__(self, x: Tensor) -> Tensor:
        if self.int8:
            return self._of_int8(*to_int8(x, 0))
        return super().__call__(x)

    def of_ones(self, like: Tensor, rows: int) -> Tensor:
        return self.total.unsqueeze(1)

    def of_codes(
        self, codes: Tensor, bits: int, offset: Tensor, step: Tensor, dtype: torch.dtype
    ) -> Tensor:
        if not self.int8:
            return super().of_codes(codes, bits, offset, step, dtype)
        # Around their middle, where the rounding of dy does least, codes fit int8.
        middle = 2 ** (bits - 1)
        grad = self._of_int8((codes - middle).view(torch.int8), step.unsqueeze(0))
        return grad.addr_(self.total.to(grad.dtype), offset + middle * step)

    def of_function(
        self,
        function: str,
        codes: Tensor,
        bits: int,
        offset: Tensor,
        step: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        if not self.int8:
            return super().of_function(function, codes, bits, offset, step, dtype)
        return self._of_int8(*activation_to_int8(codes, bits, offset, step, function))

    def _of_int8(self, codes: Tensor, scale: Tensor) -> Tensor:
        dy, dy_scale = to_int8(self.dy, 0)
        grad: Tensor = scaled_gemm(dy.T, codes, dy_scale.T, scale, scale.dtype)
        return grad


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
        ctx.int8 = layer.int8_gemms(x)
        # Autocast saves a low-precision copy of the weight; the parameter itself costs nothing.
        ctx.save_for_backward(weight if ctx.needs_input_grad[0] else None, *kept)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        rows = torch.Size((ctx.shape[:-1].numel(), ctx.shape[-1]))
        dy = flat(dy)
        product = Gemm(dy, int8=ctx.int8[0])
        dx = dw = db = None
        # Gradients in dy's dtype are cast to their parameter's by the engine, as in stock.
        with no_autocast(dy.device):
            # First, so that a restored input is gone before dX, which is as large, is made.
            if ctx.needs_input_grad[1]:
                dw = ctx.layer.weight_grad(ctx.rule, product, tuple(kept), rows, ctx.p)
            if ctx.needs_input_grad[2]:
                db = product.total
            if ctx.needs_input_grad[0]:
                dx = input_grad(dy, weight, int8=ctx.int8[1]).view(ctx.shape)
        return dx, dw, db, *[None] * (3 + len(kept))


def input_grad(dy: Tensor, weight: Tensor, int8: bool) -> Tensor:
    """dX = dy W, with int8 in the dtype of dy too."""
    if not int8:
        return dy @ weight.to(dy.dtype)
    (rows, dy_scale), (columns, w_scale) = to_int8(dy, 1), to_int8(weight, 0)
    dx: Tensor = scaled_gemm(rows, columns, dy_scale, w_scale, dy.dtype)
    return dx


class RazorLinear(WeightLayer, nn.Linear):
    """nn.Linear that saves its input by `rule`, or nothing of it while its block is not drawn.

    int8_weight_grad, int8_input_grad: whether those GEMMs of the backward pass run in int8 where
    they have SMALLEST multiplications at least; below, what comes with them takes longer.
    """

    kind: ClassVar[str] = "linear"
    SMALLEST: ClassVar[int] = 2**26
    int8_weight_grad: bool = False
    int8_input_grad: bool = False

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        assert isinstance(module, nn.Linear)
        return module.in_features

    @classmethod
    def attach(cls, module: nn.Module, rule: Rule | None, settings: Settings) -> None:
        super().attach(module, rule, settings)
        assert isinstance(module, RazorLinear)
        module.int8_weight_grad = settings.int8_weight_grad
        module.int8_input_grad = settings.int8_input_grad

    def detach(self) -> None:
        del self.int8_weight_grad, self.int8_input_grad
        super().detach()

    def forward(self, input: Tensor) -> Tensor:
        if not self.saving:
            return super().forward(input)
        x = to_compute_dtype(input)
        weight, p, rule, kept = self.keep(input, (self.kind, x.dtype), lambda: flat(x.detach()))
        y: Tensor = LinearFunction.apply(x, weight, self.bias, self, rule, p, *kept)
        return y

    def int8_gemms(self, x: Tensor) -> tuple[bool, bool]:
        """Whether the weight gradient and the input gradient of an input take int8 GEMMs."""
        large = x.numel() * self.out_features >= self.SMALLEST
        return large and self.int8_weight_grad, large and self.int8_input_grad


SWAPS = {nn.Linear: RazorLinear}
