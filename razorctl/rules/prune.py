"""Rules that store some elements or columns and prune the others."""

import torch
from torch import Tensor

from razorctl.ops.columns import column_norms, gather_columns
from razorctl.ops.topk import topk_pack
from razorctl.rules.base import Rule, survivors
from razorctl.rules.packed import PackedCentered, PackedColumns, PackedElements
from razorctl.sampling.samplers import Sampler


class TopK(Rule):
    """The elements of largest magnitude, as values and a bitmap (Back Razor, NeurIPS 2022).

    Exactly round(density * numel) elements, at least 1, are stored per tensor.
    """

    def __init__(self, density: float) -> None:
        self.density = density

    def pack(self, x: Tensor) -> PackedElements:
        values, bitmap = topk_pack(x, survivors(x.numel(), self.density))
        return PackedElements(x.shape, x.dtype, values, bitmap)


class Columns(Rule):
    """The columns of largest norm: PreBackRazor- (CVPR 2024, Tab. 4).

    round(density * columns) columns, at least 1, are stored. Only these get a weight gradient, from
    a GEMM that is smaller by the density. The other columns of dW are zero.
    """

    elementwise = False

    def __init__(self, density: float) -> None:
        self.density = density

    def pack(self, x: Tensor) -> PackedColumns:
        norms = column_norms(x)
        index = norms.topk(survivors(len(norms), self.density)).indices.sort().values
        return PackedColumns(x.shape, x.dtype, gather_columns(x, index), index, None)


class DrawnColumns(Rule):
    """The columns that a sampler draws before the forward pass: PreBackRazor (CVPR 2024, Alg. 1).

    unbiased: scales each column by 1 / p, as in the proof of Theorem 1, but not in Alg. 1. The
    sampler always learns from the unscaled gradient.
    """

    elementwise = False
    draws = True

    def __init__(self, sampler: Sampler, unbiased: bool = False) -> None:
        self.sampler: Sampler = sampler
        self.unbiased = unbiased

    def pack(self, x: Tensor) -> PackedColumns:
        index, p = self.sampler.draw(x.device)
        columns = gather_columns(x, index)
        return PackedColumns(x.shape, x.dtype, columns, index, p, self.sampler, self.unbiased)


class Centered(Rule):
    """Another rule for the activation minus the mean of each column; the means stay exact.

    X = 1 m^T + (X - 1 m^T); only the second part is pruned.
    """

    elementwise = False

    def __init__(self, rule: Rule) -> None:
        self.rule, self.draws, self.sampler = rule, rule.draws, rule.sampler

    def pack(self, x: Tensor) -> PackedCentered:
        # In double precision, so that the sum cannot overflow. A mean that is not finite (NaN
        # without rows) becomes 0, since subtracting it would give NaN.
        mean = x.mean(-2, keepdim=True, dtype=torch.float64).to(x.dtype)
        mean = torch.where(mean.isfinite(), mean, 0)
        return PackedCentered(x.shape, x.dtype, mean, self.rule.pack(x - mean))
