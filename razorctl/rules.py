"""What survives of an activation between forward and backward.

A rule sees the 2-D input [rows, columns] of a layer in compute dtype. `RULES` names them all;
a method of `recipe.py` says which rule each kind of layer gets.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from razorctl.ops.columns import gather_columns
from razorctl.ops.topk import topk_pack, topk_unpack
from razorctl.sampling import Bandit, Proportional, Sampler

Kept = tuple[Tensor, ...]


def survivors(total: int, density: float) -> int:
    """How many of `total` elements or columns a density keeps: the nearest number, at least 1."""
    return min(total, max(1, round(density * total)))


class Rule(Protocol):
    """How one activation is kept for backward. The kept sizes depend on its shape alone."""

    def keep(self, x: Tensor) -> Kept:
        """What to save of `x` [rows, columns]."""
        ...

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        """The stand-in for `x`, of `shape`, that the gradient is computed from."""
        ...

    def weight_grad(self, dy: Tensor, kept: Kept, shape: torch.Size) -> Tensor:
        """dW = dy^T restore(kept), [outputs, columns], for dy [rows, outputs]."""
        return dy.T @ self.restore(kept, shape)


class Dense(Rule):
    """All of it."""

    def keep(self, x: Tensor) -> Kept:
        return (x,)

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        return kept[0]


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

    def __init__(
        self, density: float, sampler: Sampler | None = None, unbiased: bool = False
    ) -> None:
        self.density, self.sampler, self.unbiased = density, sampler, unbiased

    def keep(self, x: Tensor) -> Kept:
        if self.sampler is not None:
            index, p = self.sampler.draw(x)
            return gather_columns(x, index), index, p
        index = _column_norms(x).topk(survivors(x.shape[1], self.density)).indices.sort().values
        return gather_columns(x, index), index

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        columns, index, *p = kept
        if self.unbiased and p:
            columns = (columns / p[0]).to(columns.dtype)
        return columns.new_zeros(shape).index_copy_(1, index, columns)

    def weight_grad(self, dy: Tensor, kept: Kept, shape: torch.Size) -> Tensor:
        columns, index, *p = kept
        grad = dy.T @ columns
        if self.sampler is not None:
            self.sampler.update(index, p[0], _column_norms(grad))
            if self.unbiased:
                grad = (grad / p[0]).to(grad.dtype)
        return grad.new_zeros(grad.shape[0], shape[1]).index_copy_(1, index, grad)


def _column_norms(x: Tensor) -> Tensor:
    """L2 norm of each column, accumulated in single precision at least."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(x, dim=0, dtype=dtype)
    return norms


def _drawn(sampler: type[Sampler]) -> Callable[[int, float, bool], Rule]:
    def build(columns: int, density: float, unbiased: bool) -> Rule:
        return Columns(density, sampler(columns, survivors(columns, density)), unbiased)

    return build


# Name -> builder from (columns of the activation, density, unbiased).
RULES: dict[str, Callable[[int, float, bool], Rule]] = {
    "dense": lambda columns, density, unbiased: Dense(),
    "topk": lambda columns, density, unbiased: TopK(density),
    "columns-norm": lambda columns, density, unbiased: Columns(density),
    "columns-uniform": _drawn(Sampler),
    "columns-bandit": _drawn(Bandit),
    "columns-proportional": _drawn(Proportional),
}
