"""Rules that keep some elements or columns and drop the others."""

import torch
from torch import Tensor

from razorctl.ops.columns import gather_columns
from razorctl.ops.topk import topk_pack, topk_unpack
from razorctl.rules.base import Kept, Product, Rule, survivors
from razorctl.sampling.samplers import Sampler


class TopK(Rule):
    """The elements of largest magnitude, as values and a bitmap (Back Razor, NeurIPS 2022).

    Exactly round(density * numel) elements are kept per tensor.
    """

    def __init__(self, density: float) -> None:
        self.density = density

    def keep(self, x: Tensor) -> Kept:
        if x.numel() == 0:
            return (x, x.new_empty(0, dtype=torch.uint8))
        values, bitmap = topk_pack(x, survivors(x.numel(), self.density))
        return values, bitmap

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        values, bitmap = kept
        dense: Tensor = topk_unpack(values, bitmap, shape)
        return dense


class Columns(Rule):
    """Whole columns: those of largest norm, or those a sampler draws before the forward pass.

    round(density * columns) columns are kept. They alone get a weight gradient, from a GEMM that
    is smaller by the density; the other columns of dW are zero. With a sampler this is
    PreBackRazor, without one PreBackRazor- (CVPR 2024, Alg. 1 and Tab. 4). `unbiased` scales each
    drawn column by 1 / p, as the proof of Theorem 1 does and Alg. 1 does not; the sampler always
    learns from the unscaled gradient.
    """

    elementwise = False

    def __init__(
        self, density: float, sampler: Sampler | None = None, unbiased: bool = False
    ) -> None:
        self.density, self.sampler, self.unbiased = density, sampler, unbiased

    def keep(self, x: Tensor) -> Kept:
        if self.sampler is not None:
            index, p = self.sampler.draw(x.device)
            return gather_columns(x, index), index, p
        index = _column_norms(x).topk(survivors(x.shape[1], self.density)).indices.sort().values
        return gather_columns(x, index), index

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        columns, index, *p = kept
        if self.unbiased and p:
            columns = (columns / p[0]).to(columns.dtype)
        return columns.new_zeros(shape).index_copy_(1, index, columns)

    def weight_grad(self, product: Product, kept: Kept, shape: torch.Size) -> Tensor:
        columns, index, *p = kept
        grad = product(columns)
        if self.sampler is not None:
            self.sampler.update(index, p[0], _column_norms(grad))
            if self.unbiased:
                grad = (grad / p[0]).to(grad.dtype)
        return grad.new_zeros(grad.shape[0], shape[1]).index_copy_(1, index, grad)


class Centered(Rule):
    """Another rule, applied to what is left once each column's mean is taken out and kept exactly.

    X = 1 m^T + (X - 1 m^T), so dW = product(1) m^T + product(X - 1 m^T): the first part is exact,
    only the second is pruned.
    """

    elementwise = False

    def __init__(self, rule: Rule) -> None:
        self.rule = rule

    def keep(self, x: Tensor) -> Kept:
        # In double precision, whose sum cannot overflow. No rows have the mean NaN, and taking away
        # an infinite one would make NaN.
        mean = x.mean(-2, keepdim=True, dtype=torch.float64).to(x.dtype)
        mean = torch.where(mean.isfinite(), mean, 0)
        return mean, *self.rule.keep(x - mean)

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        mean, *rest = kept
        return self.rule.restore(tuple(rest), shape) + mean

    def weight_grad(self, product: Product, kept: Kept, shape: torch.Size) -> Tensor:
        mean, *rest = kept
        grad = self.rule.weight_grad(product, tuple(rest), shape)
        return grad.addcmul(product.of_ones(mean, shape[0]), mean)


def _column_norms(x: Tensor) -> Tensor:
    """L2 norm of each column, accumulated in single precision at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(x, dim=0, dtype=dtype)
    return norms
