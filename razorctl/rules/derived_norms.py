"""Derived activations around norms: inputs, residual sums, x_hat and y = x_hat w + b.

The norm after a residual connection is recomputed in codes in one operation, if the stream before
the sum is stored in codes or recomputed from codes.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from razorctl.ops.int8 import int8_rows
from razorctl.ops.norm import gradients, mean_or_none
from razorctl.ops.norm_again import BITS, norm_again
from razorctl.ops.op import FewBitCopy
from razorctl.rules.derived import Derived
from razorctl.rules.packed import Packed, PackedCodes


@dataclass(frozen=True)
class DerivedAffine(Derived):
    """y = x weight + bias. others: weight and bias, [columns] or None."""

    def make(self) -> Tensor | PackedCodes:
        (weight, bias), (source,) = self.others, self.sources
        x = source.normed() if isinstance(source, DerivedNorm) else source.values()
        if isinstance(x, PackedCodes):
            return x.of_affine(weight, bias, self.dtype)
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        y = y if weight is None else y * weight
        return (y if bias is None else y + bias).to(self.dtype)


@dataclass(frozen=True)
class DerivedInput(Derived):
    """The input of a norm, x = x_hat / rstd + mean. others: mean [rows, 1] or None, and rstd."""

    def make(self) -> Tensor:
        (mean, rstd), x_hat = self.others, self.sources[0].values()
        assert rstd is not None
        x = x_hat.to(rstd.dtype) / rstd
        return (x if mean is None else x + mean).to(self.dtype)


@dataclass(frozen=True)
class DerivedSum(Derived):
    """The sum of a residual connection; `factor` multiplies the second source."""

    factor: float = 1.0

    def make(self) -> Tensor:
        x, f = self.sources
        x_values, f_values = x.values().reshape(self.shape), f.values().reshape(self.shape)
        return torch.add(x_values, f_values, alpha=self.factor).to(self.dtype)


Before = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class DerivedNorm(Derived):
    """The x_hat of a source x. others: the mean of x [rows, 1] or None, and 1 / std."""

    def make(self) -> Tensor | PackedCodes:
        (mean, rstd), parts = self.others, self._parts()
        assert rstd is not None
        if parts is not None:
            copy, f, before = parts
            made = norm_again(copy, f.values().reshape(self.shape), *before, mean, rstd)
            return PackedCodes(self.shape, self.dtype, FewBitCopy(*made, BITS, copy.tile_rows))
        x = self.sources[0].values().reshape(self.shape)
        return ((x if mean is None else x - mean) * rstd).to(self.dtype)

    def knowing(self, mean: Tensor, rstd: Tensor) -> Self:
        """A replica with the statistics that `ops.norm.normalize` returned."""
        return self.replaced(others=(mean_or_none(mean), rstd))

    def _parts(self) -> tuple[FewBitCopy, Packed, Before] | None:
        """The copy, f, and (gamma, mean, rstd) for `ops.norm_again`; None if x is no such sum.

        The first part of the sum is the input or the output of another norm.
        """
        (x,) = self.sources
        if not isinstance(x, DerivedSum) or x.factor != 1.0:
            return None
        before, f = x.sources
        mean = rstd = gamma = None
        if isinstance(before, DerivedInput):
            (mean, rstd), (before,) = before.others, before.sources
        if not isinstance(before, PackedCodes) or before.function is not None:
            return None
        if isinstance(f, DerivedAffine) and f.others[1] is None:
            (gamma, _), (f,) = f.others, f.sources
        return before.copy, f, (gamma, mean, rstd)

    def normed(self) -> Tensor | PackedCodes:
        """The value in the form that it is computed in."""
        return self._read(self.make)

    def norm_grad(
        self,
        dy: Tensor,
        weight: Tensor | None,
        rstd: Tensor,
        centers: bool,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x_hat = self.normed()
        if isinstance(x_hat, PackedCodes):
            return x_hat.norm_grad(dy, weight, rstd, centers, residual)
        return gradients(dy, x_hat, weight, rstd, centers, residual)

    def norm_grad_int8(
        self,
        dy: Tensor,
        weight: Tensor | None,
        rstd: Tensor,
        centers: bool,
        residual: Tensor | None,
    ) -> tuple[Tensor, ...]:
        x_hat = self.normed()
        if isinstance(x_hat, PackedCodes):
            return x_hat.norm_grad_int8(dy, weight, rstd, centers, residual)
        dx, *sums = gradients(dy, x_hat, weight, rstd, centers, residual)
        return dx, *sums, *int8_rows(dx)

    def of_affine(self, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Derived:
        return DerivedAffine(self.shape, dtype, (self,), (weight, bias))
