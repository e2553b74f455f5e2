"""Activation functions: GELU and SiLU store their input by a rule, ReLU one bit per element.

Back Razor and Sheared Backpropagation store these inputs dense in half precision (rule `half`):
gelu'(0) is 1/2, so an element pruned to 0 would get a wrong derivative. If a norm offers a copy of
the input, that copy is stored instead.
"""

import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from razorctl.layers.autocast import compute_dtype
from razorctl.layers.base import RazorLayer, Swaps, flat, flat_shape, save, saved
from razorctl.layers.once_differentiable import once_differentiable
from razorctl.layers.shared_copies import layouts
from razorctl.layers.shared_copies.int8_gradients import Int8, Int8Gradient
from razorctl.layers.shared_copies.memo import copy_of
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.images import memory_format, pixels, unrolled
from razorctl.ops.kernels import fused
from razorctl.ops.slopes import slope_bits, slope_grad
from razorctl.rules.base import Rule
from razorctl.rules.derived import DerivedCall, DerivedCopy
from razorctl.rules.packed import Packed
from razorctl.system.spans import packing


class ActivationFunction(torch.autograd.Function):
    """y = f(x), the stock forward; dx = f'(x') dy, with x' the packed values.

    by_channel: whether rows of the copy are pixels. wanted: whether to return dx in int8.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layer: "Activation",
        packed: Packed,
        by_channel: bool = False,
        wanted: bool = False,
    ) -> Tensor:
        ctx.layer, ctx.by_channel, ctx.wanted = layer, by_channel, wanted
        save(ctx, packed)
        return _run(ctx, x, layer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.by_channel:
            return _gradient(ctx, dy), None, None, None, None
        dx = _gradient(ctx, pixels(dy))
        return unrolled(dx, dy.shape, like=dy), None, None, None, None


class FusedActivationFunction(torch.autograd.Function):
    """`ActivationFunction` with one operation that computes y and packs x.

    Returns y and the tensors of the copy.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layer: "Activation", rule: Rule, wanted: bool
    ) -> tuple[Tensor, ...]:
        ctx.layer, ctx.wanted = layer, wanted
        function = layer.function_of(layer)
        assert function is not None
        with packing():
            y, *tensors = rule.pack_function(x, function)
        save(ctx, rule.packed(flat_shape(x), x.dtype, *tensors))
        ctx.mark_non_differentiable(*tensors)
        ctx.set_materialize_grads(False)
        return y, *tensors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *nothing: Any) -> tuple[Tensor | None, ...]:
        return _gradient(ctx, dy), None, None, None


def _run(ctx: Any, x: Tensor, layer: "Activation") -> Tensor:
    """The stock f(x), in place if the layer says so."""
    if not getattr(layer, "inplace", False):
        return layer.stock(x)
    layer.stock(x)
    ctx.mark_dirty(x)
    return x


def _gradient(ctx: Any, dy: Tensor) -> Tensor:
    (packed,) = saved(ctx)
    function = ctx.layer.function_of(ctx.layer)
    if ctx.wanted:
        int8 = Int8(*packed.function_grad_int8(function, flat(dy)))
        return Int8Gradient(dy.shape, dy.dtype, int8)
    dx: Tensor = packed.function_grad(function, flat(dy))
    return dx.view(dy.shape)


class Activation(RazorLayer):
    """Base of razor activations."""

    kind: ClassVar[str] = "activation"
    formula: ClassVar[str | None] = None  # the name of f, if every module of the class has one

    @classmethod
    def function_of(cls, module: nn.Module) -> str | None:
        return cls.formula

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return rule.elementwise

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if args else next(iter(kwargs.values()))
        if not (self.saving and x.requires_grad):
            return self.stock(x)
        y: Tensor
        wanted = self.memo is not None and self.memo.handover.wanted(x)
        layout, copy = self.offered(x)
        if copy is not None:
            by_channel = layout != layouts.of_rows(compute_dtype(x))
            y = ActivationFunction.apply(x, self, copy, by_channel, wanted and not by_channel)
            self.hand_on(y, layout, copy)
            return y
        rule, inplace = self.rules.of(x.dtype), getattr(self, "inplace", False)
        fuses = not inplace and self.function_of(self) is not None and fused(x.device)
        if fuses and rule.fuses:
            y, *tensors = FusedActivationFunction.apply(x, self, rule, wanted)
            copy = rule.packed(flat_shape(x), x.dtype, *tensors)
        else:
            with packing(), torch.no_grad():
                # A rule may store the tensor itself, which an in-place function will overwrite.
                rows = flat(x.detach().clone() if inplace else x.detach())
                copy = copy_of(rows, self.rules)
            y = ActivationFunction.apply(x, self, copy)
        self.offer(y, copy)
        return y

    def offered(self, x: Tensor) -> tuple[Hashable, Packed | None]:
        """The layout and the copy of `x` that another layer offers; both may be None."""
        derived = self.derived_rows(x)
        if derived is not None:
            return layouts.of_rows(derived.dtype), derived
        if self.memo is not None:
            dtype = compute_dtype(x)
            for layout in (layouts.of_rows(dtype), layouts.of_patches(dtype)):
                copy = self.memo.find(x, layout, self)
                if copy is not None and copy.shareable:
                    return layout, copy
        return None, None

    def hand_on(self, y: Tensor, layout: Hashable, copy: Packed) -> None:
        """Offers a copy of x to the readers of y = f(x); they apply f to its values."""
        function = self.function_of(self)
        of_y = None if function is None else copy.of_function(function)
        if self.memo is not None and of_y is not None:
            self.memo.offer(y, layout, of_y)
            if self.memo.derives and layout == layouts.of_rows(of_y.dtype):  # for other layer kinds
                self.memo.derive(y, DerivedCopy(y.shape, y.dtype, (of_y,)))

    def offer(self, y: Tensor, copy: Packed) -> None:
        """Offers a copy of x to the readers of y = f(x), unless autocast changes the dtype."""
        if compute_dtype(y) == y.dtype:
            self.hand_on(y, layouts.of_rows(y.dtype), copy)


class GELU(Activation):
    """GELU: x Phi(x), or its tanh approximation if the module asks for it."""

    @classmethod
    def function_of(cls, module: nn.Module) -> str:
        return "gelu" if getattr(module, "approximate", "none") == "none" else "gelu-tanh"


class TanhGELU(Activation):
    """The tanh approximation of GELU."""

    formula = "gelu-tanh"


class QuickGELU(Activation):
    """Quick GELU: x sigmoid(1.702 x)."""

    formula = "quick-gelu"


class SiLU(Activation):
    """SiLU: x sigmoid(x)."""

    formula = "silu"


class Hardswish(Activation):
    """Hard swish: x min(max(x + 3, 0), 6) / 6."""

    formula = "hardswish"


class TwoSlopesFunction(torch.autograd.Function):
    """A function with two slopes; one bit per element gives the exact gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "TwoSlopes") -> Tensor:
        ctx.slopes, ctx.form = layer.slopes(), memory_format(x)
        with packing():
            save(ctx, slope_bits(_as_rows(x, ctx.form).reshape(-1), *layer.between))
        return _run(ctx, x, layer)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = saved(ctx)
        dx = slope_grad(_as_rows(dy, ctx.form), bits, *ctx.slopes)
        last = ctx.form is torch.channels_last
        return (unrolled(dx, dy.shape) if last else dx.view(dy.shape)), None


def _as_rows(x: Tensor, form: torch.memory_format) -> Tensor:
    """`x` as rows in the order of a memory format: pixels if channels-last, else whole images.

    A view even if `x` is a slice of the channels of a concatenation.
    """
    if form is torch.channels_last:
        return pixels(x)
    return x.flatten(1) if x.dim() > 1 else x.reshape(1, -1)


class TwoSlopes(Activation):
    """Base of functions whose derivative has two values; they store one bit per element."""

    between: ClassVar[tuple[float, float]] = 0.0, math.inf  # the interval of the first slope

    def slopes(self) -> tuple[float, float]:
        """The two values of the derivative."""
        return 1.0, 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if args else next(iter(kwargs.values()))
        if not (self.saving and x.requires_grad):
            return self.stock(x)
        layout, copy = self.offered(x)  # before an in-place function changes x
        y: Tensor = TwoSlopesFunction.apply(x, self)
        if copy is not None:
            self.hand_on(y, layout, copy)
        return y


class ReLU(TwoSlopes):
    """max(x, 0)."""

    formula = "relu"


class ReLU6(TwoSlopes):
    """min(max(x, 0), 6)."""

    formula = "relu6"
    between = 0.0, 6.0


class LeakyReLU(TwoSlopes):
    """x above 0, and `negative_slope` x below."""

    negative_slope: float

    @classmethod
    def function_of(cls, module: nn.Module) -> str | None:
        return "leaky-relu" if module.negative_slope == 0.01 else None

    def slopes(self) -> tuple[float, float]:
        return 1.0, self.negative_slope


class Hardsigmoid(TwoSlopes):
    """min(max(x + 3, 0), 6) / 6."""

    between = -3.0, 3.0

    def slopes(self) -> tuple[float, float]:
        return 1 / 6, 0.0


class SquaredReLUFunction(torch.autograd.Function):
    """y = max(x, 0)^2, the stock forward, and dx = 2 max(x', 0) dy, with x' the packed values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "SquaredReLU", packed: Packed) -> Tensor:
        save(ctx, packed)
        return layer.stock(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (packed,) = saved(ctx)
        x = packed.values().to(dy.dtype).view(dy.shape)
        return x.clamp(min=0).mul_(2).mul_(dy), None, None


class SquaredReLU(Activation):
    """max(x, 0)^2; its output is recomputed if its input is."""

    def forward(self, x: Tensor) -> Tensor:
        if not (self.saving and x.requires_grad):
            return self.stock(x)
        derived = self.derived_rows(x)
        with packing(), torch.no_grad():
            copy = copy_of(flat(x.detach()), self.rules) if derived is None else derived
        y: Tensor = SquaredReLUFunction.apply(x, self, copy)
        if self.memo is not None and derived is not None:
            again = DerivedCall(derived.shape, derived.dtype, (derived,), call=_squared_relu)
            self.memo.derive(y, DerivedCopy(y.shape, y.dtype, (again,)))
        return y


def _squared_relu(x: Tensor) -> Tensor:
    return x.clamp(min=0).square()


# Name of a function -> the razor class of modules that compute it in another spelling.
BY_NAME: dict[str, type[Activation]] = {
    "gelu": GELU,
    "gelu-tanh": TanhGELU,
    "quick-gelu": QuickGELU,
    "silu": SiLU,
    "hardswish": Hardswish,
    "relu": ReLU,
    "relu6": ReLU6,
}


@torch.no_grad()
def by_values(function: Callable[[Tensor], Any]) -> type[Activation] | None:
    """The razor class of a function that computes the values of one in BY_NAME; else None."""
    x = torch.linspace(-9, 9, 60, device="cpu").view(6, 10)
    try:
        y, row = function(x.clone()), function(x[:1].clone())
    except Exception:
        return None
    near = partial(torch.allclose, rtol=0.0, atol=2e-6)  # kernels round ends of rows in other ways
    if not (isinstance(y, Tensor) and y.shape == x.shape and near(y[:1], row)):
        return None
    return next((r for name, r in BY_NAME.items() if near(y, FUNCTIONS[name].forward(x))), None)


SWAPS: Swaps = {
    nn.GELU: GELU,
    nn.SiLU: SiLU,
    nn.Hardswish: Hardswish,
    nn.ReLU: ReLU,
    nn.ReLU6: ReLU6,
    nn.LeakyReLU: LeakyReLU,
    nn.Hardsigmoid: Hardsigmoid,
}
