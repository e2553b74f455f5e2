"""Layer scale: y = x gamma with a learned gamma per column; only dgamma needs x.

After a razor linear layer, x = a W^T + b, it stores nothing itself. With G = dy^T a,

dgamma = rowsum(W G) + b sum(dy)    dW = gamma G    db = gamma sum(dy)    da = dy (gamma W)

so dx = dy gamma is never computed. After other layers it stores x by its rule.
"""

import weakref
from collections import OrderedDict
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from razorctl.layers.autocast import no_autocast
from razorctl.layers.base import LayerSettings, RazorLayer, flat, save, saved, shaped, unpacked
from razorctl.layers.fsdp import lasting
from razorctl.layers.kinds.linear import Gemms, LinearCall
from razorctl.layers.once_differentiable import once_differentiable
from razorctl.layers.shared_copies.memo import copy_of
from razorctl.layers.shared_copies.mlp_tiles import hidden
from razorctl.rules.base import Rule, Rules
from razorctl.rules.derived import Derived, DerivedLinear
from razorctl.rules.derived_norms import DerivedAffine, DerivedSum
from razorctl.system.spans import packing


class ScaleFunction(torch.autograd.Function):
    """dx = dy gamma, exact; dgamma = sum over rows of dy x', with x' the packed values."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gamma: Tensor, layer: "Scale", derived: Derived | None
    ) -> Tensor:
        packed = None
        if ctx.needs_input_grad[1]:
            with packing():
                packed = copy_of(flat(x), layer.rules) if derived is None else derived
        ctx.layer = layer
        save(ctx, gamma, packed)
        return x * gamma

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gamma, packed = saved(ctx)
        dx = dgamma = None
        with no_autocast(dy.device):
            if ctx.needs_input_grad[1]:
                dgamma = (flat(dy) * packed.values()).sum(0)
            if ctx.needs_input_grad[0]:
                dx = dy * gamma
        return dx, dgamma, None, None


class ScaledLinearFunction(torch.autograd.Function):
    """y = x gamma for the output x of a linear layer, with the gradients of both.

    Its graph leads to the layer's input, weight and bias, and skips x. If x still exists in the
    backward pass, something may ask for its gradient. In that case, or if x got a hook, the graph
    leads to x, and dgamma comes from the recomputed x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gamma: Tensor,
        x: Tensor,
        call: LinearCall,
    ) -> Tensor:
        ctx.layer, ctx.shape, ctx.dtype, ctx.x = call.layer, a.shape, x.dtype, weakref.ref(x)
        ctx.hooks = _hooks_of(x, call.node)
        ctx.int8 = call.layer.int8_gemms(a)
        # It reads the copy in place of the linear layer, which is counted as the reader.
        ctx.forms = [call.copy.holding(repeat(None))]
        ctx.save_for_backward(weight, bias, gamma, *call.copy.tensors)
        return x * gamma

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, gamma, *tensors = unpacked(ctx)
        packed, layer = ctx.forms[0].holding(iter(tensors)), ctx.layer
        layer.gather(weight)
        da = dw = db = None
        with no_autocast(dy.device):
            if ctx.x() is not None or ctx.hooks:
                form = DerivedLinear(dy.shape, ctx.dtype, (packed,), (weight, bias))
                x = form.replaced(matrix=layer.matrix, int8=ctx.int8[1]).values()
                dgamma = flat(dy * x).sum(0)
                return None, None, None, dgamma, dy * gamma, None
            # In int8, columns of small gamma must not coarsen the others: dy is scaled first.
            scale = _near(gamma) if any(ctx.int8) else torch.ones_like(gamma)
            rows = flat(dy * scale if any(ctx.int8) else dy).to(ctx.dtype)
            matrix, ratio = layer.matrix(weight), gamma / scale
            weight_int8, input_int8 = ctx.int8
            scaled = ratio[:, None] * matrix if ctx.needs_input_grad[0] else None
            gemms = Gemms(rows, weight_int8, input_int8, weight=scaled)
            tiles = hidden(packed, gemms) if ctx.needs_input_grad[0] else None
            if tiles is not None:
                da, a = tiles.run(gemms, ctx.shape, rows.dtype)
                products = [gemms.product_of_codes(a.pop())]
            else:
                products = [gemms.product(operand) for operand in packed.operands()]
            product = layer.weight_grad(packed, products, 1.0)
            dgamma = (matrix * product).sum(1)
            if bias is not None:
                dgamma += bias * gemms.total
                db = ratio * gemms.total
            dgamma /= scale
            dw = layer.matrix(ratio[:, None] * product)
            del product
            if ctx.needs_input_grad[0] and da is None:
                da = shaped(gemms.input_grad(), ctx.shape)
        return da, dw, db, dgamma, None, None


def _hooks_of(x: Tensor, node: Any) -> Any:
    """The dict of hooks of x: later hooks appear in it, and it outlives x."""
    if x._backward_hooks is None:  # as `Tensor.register_hook` begins
        x._backward_hooks = OrderedDict()
        node._register_hook_dict(x)
    return x._backward_hooks


FLOOR = 0.5  # of the mean |gamma|: the smallest factor of a column of dy in int8


def _near(gamma: Tensor) -> Tensor:
    """gamma, with |gamma| at least FLOOR of its mean."""
    size = gamma.abs()
    floor = FLOOR * size.mean()
    floor = torch.where(floor > 0, floor, 1.0)
    return torch.where(size < floor, floor, gamma)


class Scale(RazorLayer):
    """Base of razor layers that scale activations. gammas: the attributes that hold the factors."""

    kind: ClassVar[str] = "scale"
    gammas: ClassVar[tuple[str, ...]] = ("gamma",)

    @classmethod
    def factors(cls, module: nn.Module) -> list[Tensor]:
        """The factors of a module, [columns] each; an attribute may hold none."""
        values = [getattr(module, name) for name in cls.gammas]
        return [gamma for gamma in values if isinstance(gamma, Tensor)]

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        return next((gamma.numel() for gamma in cls.factors(module)), 1)

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return bool(cls.factors(module)) and not getattr(module, "inplace", False)

    @classmethod
    def attach(cls, module: nn.Module, rules: Rules | None, settings: LayerSettings) -> None:
        super().attach(module, rules, settings)
        if settings.memo is not None:
            trained = [gamma for gamma in cls.factors(module) if gamma.requires_grad]
            settings.memo.scaled.update(gamma.numel() for gamma in trained)

    def scaled(self, x: Tensor, gamma: Tensor) -> Tensor:
        """x gamma."""
        offered = () if self.memo is None else self.memo.derived((x,), self)
        call = self._call(x) if gamma.requires_grad else None
        y: Tensor
        if call is None:
            takes = offered and self.rules.of(x.dtype).again
            y = ScaleFunction.apply(x, gamma, self, offered[0].rows(x.dtype) if takes else None)
        else:
            y = ScaledLinearFunction.apply(call.x, call.weight, call.bias, gamma, x, call)
        if self.memo is not None and offered:
            scaled = DerivedAffine(x.shape, y.dtype, offered, (lasting(gamma.detach()), None))
            self.memo.derive(y, scaled)
        return y

    def joined(self, x: Tensor, f: Tensor) -> Tensor:
        """x + f of a residual connection, derived if both are."""
        y = x + f
        parts = () if self.memo is None else self.memo.both(x, f, self)
        if self.memo is not None and parts:
            self.memo.derive(y, DerivedSum(y.shape, y.dtype, parts))
        return y

    def _call(self, x: Tensor) -> LinearCall | None:
        """The linear call that computed x, if nothing else reads the gradient of x."""
        call: LinearCall | None = None if self.memo is None else self.memo.call(x, self)
        return call if call is not None and call.leads_to(x) else None


class LayerScale(Scale):
    """Base of razor layer scales."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x, *self.factors(self)) if self.saving else self.stock(x)


class ScaledBranches(Scale):
    """Base of blocks that scale their two branches themselves; a branch may have no gamma."""

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return True

    def branch(self, number: int, f: Tensor) -> Tensor:
        """The output f of a branch times its gamma, if it has one."""
        gamma = getattr(self, self.gammas[number])
        return self.scaled(f, gamma) if isinstance(gamma, Tensor) else f


class ScaledBlock(ScaledBranches):
    """Base of blocks that compute x + drop(gamma f(norm(x))) twice, with f attention and MLP."""

    gammas = ("gamma_1", "gamma_2")
    drops: ClassVar[tuple[str, str]] = ("drop_path1", "drop_path2")
    norm1: Any
    norm2: Any
    attn: Any
    mlp: Any

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or not self.saving:
            return self.stock(x, *args, **kwargs)
        drops = [getattr(self, name) for name in self.drops]
        x = self.joined(x, drops[0](self.branch(0, self.attn(self.norm1(x), **kwargs))))
        y: Tensor = x + drops[1](self.branch(1, self.mlp(self.norm2(x))))
        return y
