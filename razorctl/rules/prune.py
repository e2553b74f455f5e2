"""Rules that keep some elements or columns and prune the others."""

import torch
from torch import Tensor

from razorctl.ops.columns import column_norms, gather_columns
from razorctl.ops.topk import topk_pack
from razorctl.rules.base import Rule, survivors
from razorctl.rules.packed import PackedCentered, PackedColumns, PackedElements
from razorctl.sampling.samplers import Sampler


class TopK(Rule):
    """The elements of largest magnitude, as values and a bitmap (Back Razor, NeurIPS 2022).

    Exactly round(density * numel) elements, at least 1, are kept per tensor.
    """

    def __init__(self, density: float) -> None:
        self.density = density

    def pack(self, x: Tensor) -> PackedElements:
        values, bitmap = topk_pack(x, survivors(x.numel(), self.density))
        return PackedElements(x.shape, x.dtype, values, bitmap)


class Columns(Rule):
    """Whole columns: those of largest norm, or those a sampler draws before the forward pass.

    round(density * columns) columns, at least 1, are kept. They alone get a weight gradient, from
    a GEMM that is smaller by the density; the other columns of dW are zero. With a sampler this is
    PreBackRazor (CVPR 2024, Alg. 1), without one PreBackRazor- (Tab. 4). `unbiased` scales each
    drawn column by 1 / p, as the proof of Theorem 1 does and Alg. 1 does not; the sampler always
    learns from the unscaled gradient.
    """

    elementwise = False

    def __init__(
        self, density: float, sampler: Sampler | None = None, unbiased: bool = False
    ) -> None:
        self.density, self.sampler, self.unbiased = density, sampler, unbiased

    def pack(self, x: Tensor) -> PackedColumns:
        p = None
        if self.sampler is not None:
            index, p = self.sampler.draw(x.device)
        else:
            norms = column_norms(x)
            index = norms.topk(survivors(len(norms), self.density)).indices.sort().values
        columns = gather_columns(x, index)
        return PackedColumns(x.shape, x.dtype, columns, index, p, self.sampler, self.unbiased)


class Centered(Rule):
    """Another rule for the activation minus the mean of each column; the means are kept exactly.

    X = 1 m^T + (X - 1 m^T), of which only the second part is pruned.
    """

    elementwise = False

    def __init__(self, rule: Rule) -> None:
        self.rule, self.sampler = rule, rule.sampler

    def pack(self, x: Tensor) -> PackedCentered:
        # In double precision, so that the sum cannot overflow. A mean that is not finite (NaN if
        # there are no rows) becomes 0, since subtracting it would make NaN.
        mean = x.mean(-2, keepdim=True, dtype=torch.float64).to(x.dtype)
        mean = torch.where(mean.isfinite(), mean, 0)
        return PackedCentered(x.shape, x.dtype, mean, self.rule.pack(x - mean))
