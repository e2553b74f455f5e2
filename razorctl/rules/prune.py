"""Rules that keep some elements or columns and prune the others."""

import torch
from torch import Tensor

from razorctl.ops.columns import gather_columns
from razorctl.ops.topk import topk_pack, topk_unpack
from razorctl.rules.base import Product, Rule, survivors
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

    def unpack(self, packed: PackedElements) -> Tensor:
        x: Tensor = topk_unpack(packed.values, packed.bitmap, packed.shape)
        return x


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
            norms = _column_norms(x)
            index = norms.topk(survivors(len(norms), self.density)).indices.sort().values
        return PackedColumns(x.shape, x.dtype, gather_columns(x, index), index, p)

    def unpack(self, packed: PackedColumns) -> Tensor:
        columns = self._scaled(packed.columns, packed.probability)
        return columns.new_zeros(packed.shape).index_copy_(1, packed.index, columns)

    def weight_grad(self, product: Product, packed: PackedColumns) -> Tensor:
        grad, index, p = product(packed.columns), packed.index, packed.probability
        if self.sampler is not None and p is not None:
            self.sampler.update(index, p, _column_norms(grad))
        grad = self._scaled(grad, p)
        return grad.new_zeros(grad.shape[0], packed.shape[1]).index_copy_(1, index, grad)

    def _scaled(self, columns: Tensor, p: Tensor | None) -> Tensor:
        return (columns / p).to(columns.dtype) if self.unbiased and p is not None else columns


class Centered(Rule):
    """Another rule for the activation minus the mean of each column; the means are kept exactly.

    X = 1 m^T + (X - 1 m^T), so dW = product(1) m^T + product(X - 1 m^T): the first part is exact,
    only the second is pruned.
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

    def unpack(self, packed: PackedCentered) -> Tensor:
        return self.rule.unpack(packed.rest) + packed.mean

    def weight_grad(self, product: Product, packed: PackedCentered) -> Tensor:
        grad = self.rule.weight_grad(product, packed.rest)
        ones = product.of_ones(packed.mean, packed.shape[0])
        return grad.addcmul(ones.view(*grad.shape[:-1], 1), packed.mean)


def _column_norms(x: Tensor) -> Tensor:
    """L2 norm of each column, accumulated in single precision at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(x, dim=0, dtype=dtype)
    return norms
