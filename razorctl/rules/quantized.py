"""What survives of an activation between forward and backward.

A rule sees an activation as [rows, columns], the columns being its last axis (of images: the
channels), in the dtype that the layer computes in. Attention, which takes elementwise rules alone,
shows them [heads, tokens, columns] or [batch, tokens, columns of all heads]. `RULES` names them
all; a method of `recipe.py` says which rule each kind of layer gets.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from razorctl.errors import UsageError
from razorctl.ops import buckets
from razorctl.ops.activation import FUNCTIONS, activation_grad
from razorctl.ops.buckets import from_buckets, to_buckets
from razorctl.ops.columns import gather_columns
from razorctl.ops.quantise import BITS, codes, dequantise, quantise, scales
from razorctl.ops.topk import topk_pack, topk_unpack
from razorctl.rules.allocation import largest
from razorctl.sampling.samplers import Bandit, Proportional, Sampler

Kept = tuple[Tensor, ...]


class Product:
    """Columns of an activation [rows, c] -> their columns of the weight gradient, [anything, c].

    Linear in its argument, column by column; for a linear layer x -> dy^T x.
    """

    def __init__(self, multiply: Callable[[Tensor], Tensor]) -> None:
        self.multiply = multiply

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x)

    def of_ones(self, like: Tensor, rows: int) -> Tensor:
        """The product of one column of ones."""
        return self(like.new_ones(rows, 1))

    def of_codes(
        self, codes: Tensor, bits: int, offset: Tensor, step: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """The product of offset + step * code in `dtype`, for uint8 codes and scales [columns]."""
        return self(dequantise(codes, offset, step, dtype))

    def of_function(
        self,
        function: str,
        codes: Tensor,
        bits: int,
        offset: Tensor,
        step: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """The product of f(x) for x of codes [blocks, rows, c] and scales [blocks, c]."""
        x = dequantise(codes, offset, step, dtype).flatten(0, 1)
        return self(FUNCTIONS[function].forward(x))


def survivors(total: int, density: float) -> int:
    """How many of `total` elements or columns a density keeps: the nearest number, at least 1."""
    return min(total, max(1, round(density * total)))


class Rule(Protocol):
    """How one activation is kept for backward. The kept sizes depend on its shape alone.

    prunes: whether less than everything is kept. elementwise: whether elements are kept whatever
    the number of columns.
    """

    prunes: bool = True
    elementwise: bool = True

    def keep(self, x: Tensor) -> Kept:
        """What to save of `x` [rows, columns] or, if elementwise, of any shape."""
        ...

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        """The stand-in for `x`, of `shape`, that the gradient is computed from."""
        ...

    def weight_grad(self, product: Product, kept: Kept, shape: torch.Size) -> Tensor:
        """dW = product(restore(kept)), [anything, columns]."""
        return product(self.restore(kept, shape))

    def lends(self, kept: Kept) -> bool:
        """Whether what was kept of x stands for functions of x too, close enough for a GEMM."""
        return False

    def of_function(self, function: str) -> "Rule":
        """The rule for inputs of that activation function, one in `ops.activation.FUNCTIONS`."""
        return self

    def function_grad(self, function: str, dy: Tensor, kept: Kept) -> Tensor:
        """f'(x) dy for dy [rows, columns]."""
        x = self.restore(kept, dy.shape)
        return FUNCTIONS[function].backward(dy, x.to(dy.dtype))

    def function_weight_grad(
        self, function: str, product: Product, kept: Kept, shape: torch.Size
    ) -> Tensor:
        """`weight_grad` of a layer whose input is f(x)."""
        return product(FUNCTIONS[function].forward(self.restore(kept, shape)))

    def affine(
        self, kept: Kept, weight: Tensor | None, bias: Tensor | None, like: Tensor
    ) -> Kept | None:
        """What was kept of x as kept of x weight + bias in the dtype of `like`; None for no way."""
        return None


class Dense(Rule):
    """All of it."""

    prunes = False

    def keep(self, x: Tensor) -> Kept:
        return (x,)

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        return kept[0]


class Half(Rule):
    """All of it in half precision; values beyond the range of float16 become its largest.

    16-bit activations are kept as they are. Back Razor's choice for activation functions, whose
    derivative at 0 is not 0, so that pruning would distort it.
    """

    prunes = False

    def keep(self, x: Tensor) -> Kept:
        if x.element_size() <= 2:
            return (x,)
        limit = torch.finfo(torch.float16).max
        return x.clamp(-limit, limit).half(), x.new_empty(0)  # the second for its dtype

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        return kept[0].to(kept[-1].dtype)


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


class Quantised(Rule):
    """All elements, in few bits: codes with a zero and a step for each column.

    Of an activation [blocks, rows, columns] each block has its own. Group quantisation as in ActNN
    (2021) and Mesa (2021), with columns for groups: a GEMM that contracts rows can take the codes,
    and columns of activations differ more than rows do. `rows` cuts columns into blocks of at least
    so many, which come closer but which no GEMM can contract.
    """

    prunes = False

    def __init__(self, bits: int, stochastic: bool = False, rows: int | None = None) -> None:
        self.bits, self.stochastic, self.rows = bits, stochastic, rows

    def keep(self, x: Tensor) -> Kept:
        packed, zero, step = quantise(x.view(self._tiles(x.shape)), self.bits, self.stochastic)
        return packed, zero, step, x.new_empty(0)  # the last for its dtype

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        packed, _, _, like = kept
        unpacked = codes(packed, self._tiles(shape), self.bits)
        x: Tensor = dequantise(unpacked, *_scales(kept), like.dtype)
        return x.view(shape)

    def weight_grad(self, product: Product, kept: Kept, shape: torch.Size) -> Tensor:
        packed, _, _, like = kept
        offset, step = _scales(kept)
        if len(step) > 1:
            return super().weight_grad(product, kept, shape)
        unpacked = codes(packed, list(shape), self.bits)
        return product.of_codes(unpacked, self.bits, offset[0], step[0], like.dtype)

    def _tiles(self, shape: torch.Size) -> list[int]:
        """`shape` as [blocks, rows, columns]: as many equal blocks as there may be."""
        if len(shape) == 3:
            return list(shape)
        rows, columns = shape
        most = max(1, rows // (self.rows or max(1, rows)))
        blocks = next(n for n in range(most, 0, -1) if rows % n == 0)
        return [blocks, rows // blocks, columns]

    def lends(self, kept: Kept) -> bool:
        return True

    def function_grad(self, function: str, dy: Tensor, kept: Kept) -> Tensor:
        tiles = self._tiles(dy.shape)
        unpacked = codes(kept[0], tiles, self.bits)
        dx: Tensor = activation_grad(dy.reshape(tiles), unpacked, *_scales(kept), function)
        return dx.view(dy.shape)

    def function_weight_grad(
        self, function: str, product: Product, kept: Kept, shape: torch.Size
    ) -> Tensor:
        unpacked = codes(kept[0], self._tiles(shape), self.bits)
        scales = _scales(kept)
        return product.of_function(function, unpacked, self.bits, *scales, kept[-1].dtype)

    def affine(
        self, kept: Kept, weight: Tensor | None, bias: Tensor | None, like: Tensor
    ) -> Kept | None:
        offset, step = _scales(kept)
        if weight is not None:
            offset, step = offset * weight, step * weight
        return kept[0], offset if bias is None else offset + bias, step, like


def _scales(kept: Kept) -> tuple[Tensor, Tensor]:
    """Offset and step of what `Quantised` has kept, or `affine` has made of it."""
    _, zero, step, _ = kept
    return (zero, step) if zero.is_floating_point() else scales(zero, step)


class Buckets(Rule):
    """Of the input of an activation function, the interval that tells its derivative best.

    Restores a stand-in with that derivative; see `ops.buckets`. It stands for nothing else: least
    of all for the output, which the next layer keeps for itself.
    """

    prunes = False

    def __init__(self, bits: int, function: str = "gelu") -> None:
        self.bits, self.function = bits, function

    def keep(self, x: Tensor) -> Kept:
        return to_buckets(x, self.function, self.bits), x.new_empty(0)  # the second for its dtype

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        packed, like = kept
        x: Tensor = from_buckets(packed, list(shape), self.function, self.bits, like.dtype)
        return x

    def of_function(self, function: str) -> Rule:
        return Buckets(self.bits, function)


class ByPrecision(Rule):
    """One rule for activations of 16 bits and another for wider ones.

    Of both, the last tensor that they keep has the dtype of the activation.
    """

    prunes = False

    def __init__(self, wide: Rule, narrow: Rule) -> None:
        self.wide, self.narrow = wide, narrow

    def of(self, like: Tensor) -> Rule:
        """The rule for activations of the dtype of `like`."""
        return self.narrow if like.element_size() <= 2 else self.wide

    def keep(self, x: Tensor) -> Kept:
        return self.of(x).keep(x)

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        return self.of(kept[-1]).restore(kept, shape)

    def weight_grad(self, product: Product, kept: Kept, shape: torch.Size) -> Tensor:
        return self.of(kept[-1]).weight_grad(product, kept, shape)

    def lends(self, kept: Kept) -> bool:
        return self.of(kept[-1]).lends(kept)

    def of_function(self, function: str) -> Rule:
        return ByPrecision(self.wide.of_function(function), self.narrow.of_function(function))

    def function_grad(self, function: str, dy: Tensor, kept: Kept) -> Tensor:
        return self.of(kept[-1]).function_grad(function, dy, kept)

    def function_weight_grad(
        self, function: str, product: Product, kept: Kept, shape: torch.Size
    ) -> Tensor:
        return self.of(kept[-1]).function_weight_grad(function, product, kept, shape)

    def affine(
        self, kept: Kept, weight: Tensor | None, bias: Tensor | None, like: Tensor
    ) -> Kept | None:
        return self.of(kept[-1]).affine(kept, weight, bias, like)


class Unmet(Rule):
    """For activations of 16 bits, where no rule saves as little as was promised: UsageError."""

    def keep(self, x: Tensor) -> Kept:
        raise UsageError(
            "the ratio cannot be met with activations of 16 bits; the largest that can is "
            f"{largest('narrow'):g}."
        )

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        raise NotImplementedError


class Through(Rule):
    """The output of an activation function, from what another rule keeps of its input."""

    prunes = False

    def __init__(self, function: str, rule: Rule) -> None:
        self.function, self.rule = function, rule

    def keep(self, x: Tensor) -> Kept:
        """Of the input of the function."""
        return self.rule.keep(x)

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        return FUNCTIONS[self.function].forward(self.rule.restore(kept, shape))

    def weight_grad(self, product: Product, kept: Kept, shape: torch.Size) -> Tensor:
        return self.rule.function_weight_grad(self.function, product, kept, shape)


class Centred(Rule):
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


def _drawn(sampler: type[Sampler]) -> Callable[[int, float, bool], Rule]:
    def build(columns: int, density: float, unbiased: bool) -> Rule:
        return Columns(density, sampler(columns, survivors(columns, density)), unbiased)

    return build


def _quantised(bits: int, **options: Any) -> Callable[[int, float, bool], Rule]:
    return lambda columns, density, unbiased: Quantised(bits, **options)


def _buckets(bits: int) -> Callable[[int, float, bool], Rule]:
    return lambda columns, density, unbiased: Buckets(bits)


# Name -> builder from (columns of the activation, density, unbiased).
RULES: dict[str, Callable[[int, float, bool], Rule]] = {
    "dense": lambda columns, density, unbiased: Dense(),
    "half": lambda columns, density, unbiased: Half(),
    "topk": lambda columns, density, unbiased: TopK(density),
    **{f"{bits}-bit": _quantised(bits) for bits in BITS},
    **{f"{bits}-bit-stochastic": _quantised(bits, stochastic=True) for bits in BITS},
    **{f"{bits}-bit-blocks": _quantised(bits, rows=128) for bits in BITS},
    **{f"{bits}-bit-derivative": _buckets(bits) for bits in buckets.BITS},
    "columns-norm": lambda columns, density, unbiased: Columns(density),
    "columns-uniform": _drawn(Sampler),
    "columns-bandit": _drawn(Bandit),
    "columns-proportional": _drawn(Proportional),
}


def build(name: str, columns: int, density: float, unbiased: bool = False) -> Rule:
    """The rule of a name in RULES, or of two as `ByPrecision`: "WIDE/NARROW"."""
    wide, _, narrow = name.partition("/")
    rule = RULES[wide](columns, density, unbiased)
    if narrow in ("", wide):
        return rule
    if narrow == "unmet":
        return ByPrecision(rule, Unmet())
    return ByPrecision(rule, RULES[narrow](columns, density, unbiased))
