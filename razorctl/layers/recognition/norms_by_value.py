"""Norms of any class, told by their values: y = x_hat (offset + w) + b, in any spelling."""

import copy
from collections.abc import Iterator
from inspect import unwrap
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from razorctl.layers.autocast import compute_dtype
from razorctl.layers.base import LayerSettings, RazorLayer, stock_type
from razorctl.layers.kinds.norm import Norm
from razorctl.layers.shared_copies import layouts
from razorctl.rules.base import Rules

EPSILONS = ("eps", "variance_epsilon", "epsilon")  # usual attributes
CLOSE = 2e-5  # relative to the largest value


class Form(NamedTuple):
    """The formula of a norm. axis: of the channels: -1, or 1 for images."""

    eps: float
    centers: bool
    offset: float
    axis: int


class OtherNorm(Norm):
    """A norm of any class over the last axis. form: its formula."""

    form: Form
    axis: ClassVar[int] = -1

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        return _columns(module)

    @classmethod
    def attach(cls, module: nn.Module, rules: Rules | None, settings: LayerSettings) -> None:
        form = form_of(module)
        super().attach(module, rules, settings)
        module.form = form  # type: ignore[assignment]
        if "weight" not in module._parameters:
            module.weight = None  # type: ignore[assignment]

    def detach(self) -> None:
        del self.form
        vars(self).pop("weight", None)
        super().detach()

    @property
    def normalized_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The number of columns."""
        return (_columns(self),)

    @property
    def centers(self) -> bool:  # type: ignore[override]
        """Whether the norm subtracts the mean."""
        return self.form.centers

    def scale(self, weight: Tensor) -> Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        # An integer, lest a compiler take it for the forward's own sum, and store that.
        return weight.to(wide) + int(self.form.offset) if self.form.offset else weight

    def epsilon(self, x: Tensor) -> float:
        return self.form.eps


class OtherChannelNorm(OtherNorm):
    """A norm of any class over the channels of images, [batch, channels, height, width]."""

    axis = 1

    def forward(self, x: Tensor, through: bool = False) -> Tensor:
        if not self.saving or getattr(self, "_fast_norm", False):  # timm's setting may call APEX
            return RazorLayer.stock(self, x)
        normed: Tensor = super().forward(x.permute(0, 2, 3, 1))
        y = normed.permute(0, 3, 1, 2)
        if self.memo is not None:
            dtype = compute_dtype(y)
            copy = self.memo.find(normed, layouts.of_rows(dtype), self)
            if copy is not None:
                self.memo.offer(y, layouts.of_patches(dtype), copy)
        return y

    def stock(self, x: Tensor) -> Tensor:
        """The stock norm of an image whose channels are last."""
        y = super().stock(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        # Not a view, so that the memo knows views of it.
        return torch.ops.aten._unsafe_view(y, y.shape)  # type: ignore[no-any-return]


def by_values(module: nn.Module) -> type[RazorLayer] | None:
    """The razor class of a norm; None for any other module."""
    form = form_of(module)
    if form is None:
        return None
    return OtherNorm if form.axis == -1 else OtherChannelNorm


def form_of(module: nn.Module) -> Form | None:
    """The formula of a module; None if it is no norm.

    Its forward runs on rows of several sizes; the small rows show eps.
    """
    columns = _columns(module)
    if columns < 2 or module._buffers or not module._parameters.keys() <= {"weight", "bias"}:
        return None
    twin = copy.copy(module)
    twin.training = True
    at = torch.arange(columns, device="cpu")
    weight, bias = (at * 0.7).sin(), (at * 1.3).cos()
    values = {"weight": weight, "bias": bias}
    twin._parameters = {
        name: None if p is None else nn.Parameter(values[name].to(torch.float32), False)
        for name, p in module._parameters.items()
    }
    for axis, shape in ((-1, (2, 4, columns)), (1, (2, columns, 2, 2))):
        x = (torch.arange(8 * columns, device="cpu") ** 1.1).sin() + 0.5
        x = x.view(8, columns) * torch.logspace(-4, 1, 8, device="cpu")[:, None]
        image = x.view(2, 2, 2, columns).permute(0, 3, 1, 2) if axis == 1 else x.view(shape)
        try:
            with torch.no_grad():
                y: Any = stock_type(module).forward(twin, image)
        except Exception:
            continue
        if isinstance(y, Tensor) and y.shape == image.shape:
            rows = y.movedim(axis, -1).reshape(8, columns).double()
            affine = [twin._parameters.get(name) for name in ("weight", "bias")]
            for form in _forms(module, axis):
                if _close(rows, _formula(x.double(), form, *affine)):
                    return form
    return None


def _forms(module: nn.Module, axis: int) -> Iterator[Form]:
    """The formulas that a norm with these attributes and constants may have."""
    own = [vars(module).get(name) for name in EPSILONS]
    code = getattr(unwrap(stock_type(module).forward), "__code__", None)
    constants = () if code is None else code.co_consts
    numbers = [n for n in (*own, *constants, 1e-5) if isinstance(n, float) and 0 < n < 0.01]
    for eps in dict.fromkeys(numbers):
        for centers in (False, True):
            for offset in (0.0, 1.0):
                yield Form(eps, centers, offset, axis)


def _formula(x: Tensor, form: Form, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x - x.mean(-1, keepdim=True) if form.centers else x
    y = x / (x.square().mean(-1, keepdim=True) + form.eps).sqrt()
    y = y if weight is None else y * (weight.double() + form.offset)
    return y if bias is None else y + bias.double()


def _close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= CLOSE * b.abs().max())


def _columns(module: nn.Module) -> int:
    """The number of columns that a norm declares; 0 if it declares none."""
    weight = module._parameters.get("weight")
    if weight is not None:
        return weight.numel() if weight.dim() == 1 else 0
    shape: Any = vars(module).get("normalized_shape", ())
    return int(shape[0]) if isinstance(shape, (tuple, list)) and len(shape) == 1 else 0
