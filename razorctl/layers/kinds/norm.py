"""LayerNorm and RMSNorm that store x_hat by a rule."""

import logging
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from razorctl.layers.autocast import compute_dtype, no_autocast, to_compute_dtype
from razorctl.layers.base import RazorLayer, Swaps, flat_shape, name_of, save, saved, shaped
from razorctl.layers.fsdp import lasting
from razorctl.layers.once_differentiable import once_differentiable
from razorctl.layers.shared_copies import layouts
from razorctl.layers.shared_copies.int8_cost import readable
from razorctl.layers.shared_copies.int8_gradients import Handover, Int8, Statistics
from razorctl.ops.norm import normalize, statistics
from razorctl.rules.base import Rule
from razorctl.rules.dense import Dense
from razorctl.rules.derived import Derived, DerivedCopy
from razorctl.rules.derived_norms import DerivedInput, DerivedNorm
from razorctl.rules.packed import Packed
from razorctl.system.spans import packing

log = logging.getLogger(__name__)

SMALL = 0.1  # root mean square of a row of x_hat; few bits do not resolve smaller rows
SHARE = 0.5  # of the norm of dy in such rows, from which on a warning names the layer


class NormFunction(torch.autograd.Function):
    """y = x_hat w + b, the stock forward, with gradients from the packed x_hat.

    See `ops.norm.gradients`; db is exact. Back Razor prunes the raw input instead. x_hat of a
    LayerNorm has mean 0, so pruned elements are small: with the same bytes, its gradient is better.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: "Norm",
        rstd: Tensor | None,
        packed: Packed | None,
    ) -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        save(ctx, weight, rstd, packed)
        return layer.stock(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx, dy), None, None, None


class FusedNormFunction(torch.autograd.Function):
    """`NormFunction` with one operation that computes y and packs x_hat.

    Returns y, x, and the tensors of the copy. A residual connection takes the returned x; its
    gradient is added to the input's gradient in the same operation.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: "Norm",
        rule: Rule,
        dtype: torch.dtype,
        through: bool,
        statistics: Statistics | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.layer, ctx.shape = layer, x.shape
        ctx.wanted, mean, rstd = False, None, None
        if statistics is not None:
            ctx.wanted, mean, rstd = statistics.int8, statistics.mean, statistics.rstd
        options = layer.epsilon(x), layer.centers, dtype
        with packing():
            y, computed, *tensors = rule.pack_norm(x, weight, bias, *options, mean, rstd)
        rstd = computed if rstd is None else rstd
        save(ctx, weight, rstd, rule.packed(flat_shape(x), rstd.dtype, *tensors))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(rstd, *tensors)
        return y, x if through else None, rstd, *tensors

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy: Tensor | None, through: Tensor | None, *nothing: Any
    ) -> tuple[Tensor | None, ...]:
        if dy is None:
            dx, dw, db = through, None, None
        else:
            dx, dw, db = _gradients(ctx, dy, through, ctx.wanted)
        return dx, dw, db, None, None, None, None, None


class AgainNormFunction(FusedNormFunction):
    """`FusedNormFunction` for an x that is recomputed in the backward pass.

    Returns y, x, and the row statistics of x.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        layer: "Norm",
        copy: DerivedNorm,
        dtype: torch.dtype,
        through: bool,
        known: Statistics | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.layer, ctx.shape = layer, x.shape
        ctx.wanted = known is not None and known.int8
        y, mean, rstd = normalize(x, weight, bias, layer.epsilon(x), layer.centers, dtype)
        save(ctx, weight, rstd, copy.knowing(mean, rstd))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(mean, rstd)
        return y, x if through else None, mean, rstd


def _gradients(
    ctx: Any, dy: Tensor, through: Tensor | None = None, int8: bool = False
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of input, weight and bias.

    through: added to the first. int8: whether to offer an int8 copy of the first.
    """
    weight, rstd, packed = saved(ctx)
    layer, needed = ctx.layer, ctx.needs_input_grad
    dx = dw = db = None
    dy = dy.reshape(-1, layer.columns(layer))
    with no_autocast(dy.device):
        layer.check_rows(dy, rstd)
        if any(needed[:2]):
            columns = None if weight is None else layer.scale(weight).reshape(-1)
            residual = None if through is None else through.reshape(dy.shape)
            args = dy, columns, rstd, layer.centers, residual
            if int8:
                dx, dw, db, *copy = packed.norm_grad_int8(*args)
                dx = shaped(dx, ctx.shape)
                layer.handover.offer(dx, Int8(*copy))
            else:
                dx, dw, db = packed.norm_grad(*args)
                dx = shaped(dx, ctx.shape)
        elif needed[2]:
            db = dy.sum(0)
    return (
        dx if needed[0] else None,
        shaped(dw, weight.shape) if dw is not None and needed[1] else None,
        shaped(db, layer.normalized_shape) if db is not None and needed[2] else None,
    )


class Norm(RazorLayer):
    """Base of razor norms, which normalize over the last axes.

    centers: whether the norm subtracts the mean. plain: whether the stock forward is `F.layer_norm`
    or `F.rms_norm`. checked: whether the rows of a gradient have been checked.
    """

    kind: ClassVar[str] = "norm"
    centers: ClassVar[bool] = True
    plain: bool = False
    checked: bool = False
    normalized_shape: tuple[int, ...]
    weight: Any  # Tensor or None
    eps: Any  # float, or None for the machine epsilon of the dtype that it computes in

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        shape: tuple[int, ...] = module.normalized_shape  # type: ignore[assignment]
        return torch.Size(shape).numel()

    def forward(self, x: Tensor, through: bool = False) -> Any:
        """The norm of x; with `through`, the pair (norm, x), x for a residual connection.

        In a pair the norm is in the dtype that linear layers compute in, and `fuses(x)` must hold.
        """
        if not self.saving:
            return self.stock(x)
        if not self._needs_grad(x):
            return NormFunction.apply(x, self.weight, self.bias_or_none, self, None, None)
        source = self._source(x)
        if through:
            return self._fused(x, compute_dtype(x), through, source)
        if self.fuses(x):
            with torch.no_grad():
                stock = self.stock(x.new_empty(0, x.shape[-1]))  # for the dtype
            return self._fused(x, stock.dtype, through, source)[0]
        rule = self._rule(x)
        with packing():
            mean, rstd, copy = self.pack(x, rule, source)
        y: Tensor = NormFunction.apply(x, self.weight, self.bias_or_none, self, rstd, copy)
        self.offer(y, copy)
        if rule.again and source is None:
            self.derive(x, copy, mean, rstd)
        return y

    def _source(self, x: Tensor) -> Derived | None:
        """x as derived rows, else None."""
        source = self.derived_rows(x)
        return None if source is None else source.replaced(dtype=_computed(x))

    def fuses(self, x: Tensor) -> bool:
        """Whether one operation computes the norm of `x` and packs x_hat."""
        one_axis = self.plain and len(self.normalized_shape) == 1
        if not (self.saving and one_axis and self._needs_grad(x)):
            return False
        return self._rule(x).fuses

    def _fused(
        self, x: Tensor, dtype: torch.dtype, through: bool, source: Derived | None
    ) -> tuple[Tensor, Tensor | None]:
        """The norm of x in `dtype`, and x if `through`.

        source: the derived x, if there is one.
        """
        rule = self._rule(x)
        parameters = self.weight, self.bias_or_none
        known = self.handover.statistics(x, self.epsilon(x), self.centers)
        copy: Packed
        if source is None:
            y, out, rstd, *tensors = FusedNormFunction.apply(
                x, *parameters, self, rule, dtype, through, known
            )
            copy = rule.packed(flat_shape(x), _computed(x), *tensors)
        else:
            again = DerivedNorm(flat_shape(x), _computed(x), (source,))
            y, out, mean, rstd = AgainNormFunction.apply(
                x, *parameters, self, again, dtype, through, known
            )
            copy = again.knowing(mean, rstd)
        if torch.compiler.is_compiling():  # torch 2.11 sets no attribute on an output of a function
            y = y.view_as(y)
        self.offer(y, copy)
        if source is not None and through and self.memo is not None:
            self.memo.derive(out, source.replaced(shape=x.shape, dtype=x.dtype))
        elif rule.again and source is None:
            mean = known.mean if known else x.detach().mean(-1).view(-1, 1)
            self.derive(out if through else x, copy, mean if self.centers else None, rstd)
        return y, out

    def derive(self, x: Tensor, copy: Packed, mean: Tensor | None, rstd: Tensor) -> None:
        """Offers the input x as derived from a copy of x_hat."""
        if self.memo is not None:
            self.memo.derive(x, DerivedInput(x.shape, x.dtype, (copy,), (mean, rstd)))

    def check_rows(self, dy: Tensor, rstd: Tensor) -> None:
        """Warns in the first backward pass if most of dy is in rows with a variance below eps.

        Such a row of x_hat is almost zero, and rounds to zero in a tile with rows of variance 1.
        """
        if self.checked or self.memo is None or self.memo.small_rows or not readable(dy):
            return
        self.checked = True
        small = 1 - self.epsilon(rstd) * rstd.flatten().square() < SMALL**2
        if dy[small].norm() > SHARE * dy.norm():
            self.memo.small_rows = True
            log.warning(
                "rows with a variance below eps, such as a class token near zero, give most of the "
                "gradient of %s. A few bits cannot resolve such rows, so the gradients of this "
                "layer and of its readers are wrong until the rows grow; start from pretrained "
                "weights, or from a larger token.",
                name_of(self),
            )

    @property
    def bias_or_none(self) -> Tensor | None:
        """The bias, if there is one."""
        return getattr(self, "bias", None)

    @property
    def handover(self) -> Handover:
        """The memo's handover; an empty one without a memo."""
        return Handover() if self.memo is None else self.memo.handover

    def scale(self, weight: Tensor) -> Tensor:
        """The factor of x_hat, in the shape of the weight."""
        return weight

    def _rule(self, x: Tensor) -> Rule:
        return self.rules.of(compute_dtype(x))

    def _needs_grad(self, x: Tensor) -> bool:
        """Whether a gradient needs x_hat."""
        return x.requires_grad or (self.weight is not None and self.weight.requires_grad)

    def epsilon(self, x: Tensor) -> float:
        """`eps`, or the default for the dtype that x is normalized in."""
        eps: float | None = self.eps
        return torch.finfo(_computed(x)).eps if eps is None else eps

    @torch.no_grad()
    def pack(
        self, x: Tensor, rule: Rule, source: Derived | None = None
    ) -> tuple[Tensor | None, Tensor, Packed]:
        """The mean (None for RMSNorm) and 1 / std, each [rows, 1], and the copy of x_hat.

        source: the derived x, if there is one.
        """
        rows = x.detach().reshape(-1, self.columns(self))
        mean, rstd = statistics(rows, self.epsilon(x), self.centers)
        if source is not None:
            return mean, rstd, DerivedNorm(flat_shape(x), compute_dtype(x), (source,), (mean, rstd))
        x_hat = (rows if mean is None else rows - mean) * rstd
        # The dense rule packs what stock autocast stores: norms run in single precision.
        x_hat = x_hat if isinstance(rule, Dense) else to_compute_dtype(x_hat)
        return mean, rstd, rule.pack(x_hat)

    def offer(self, y: Tensor, copy: Packed) -> None:
        """Offers the codes of x_hat, with w and b, to the linear layers that read y."""
        if self.memo is not None and len(self.normalized_shape) == 1:
            dtype = compute_dtype(y)
            scale = None if self.weight is None else self.scale(self.weight.detach())
            of_y = copy.of_affine(lasting(scale), lasting(self.bias_or_none), dtype)
            if of_y is not None:
                self.memo.offer(y, layouts.of_rows(dtype), of_y)
                if self.memo.derives:  # for other layer kinds, and for views of y
                    self.memo.derive(y, DerivedCopy(y.shape, y.dtype, (of_y,)))


def _computed(x: Tensor) -> torch.dtype:
    """The dtype in which x_hat is computed."""
    return torch.promote_types(x.dtype, torch.float32)


class LayerNorm(Norm):
    """torch's LayerNorm."""

    plain = True


class RMSNorm(Norm):
    """torch's RMSNorm."""

    centers = False
    plain = True


SWAPS: Swaps = {nn.LayerNorm: LayerNorm, nn.RMSNorm: RMSNorm}
