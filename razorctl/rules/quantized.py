"""Few-bit rules, the choice between two by precision, and what a shared copy restores."""

import torch
from torch import Tensor

from razorctl.errors import UsageError
from razorctl.ops.activation import FUNCTIONS, activation_grad
from razorctl.ops.quantize import codes, dequantize, quantize, scales
from razorctl.rules.allocation import largest
from razorctl.rules.base import Kept, Product, Rule


class Quantized(Rule):
    """All elements, in few bits: codes with a zero and a step for each column.

    Of an activation [blocks, rows, columns] each block has its own. Group quantization as in ActNN
    (2021) and Mesa (2021), with columns for groups: a GEMM that contracts rows can take the codes,
    and columns of activations differ more than rows do. `rows` cuts columns into blocks of at least
    so many, which come closer but which no GEMM can contract.
    """

    prunes = False

    def __init__(self, bits: int, stochastic: bool = False, rows: int | None = None) -> None:
        self.bits, self.stochastic, self.rows = bits, stochastic, rows

    def keep(self, x: Tensor) -> Kept:
        packed, zero, step = quantize(x.view(self._tiles(x.shape)), self.bits, self.stochastic)
        return packed, zero, step, x.new_empty(0)  # the last for its dtype

    def restore(self, kept: Kept, shape: torch.Size) -> Tensor:
        packed, _, _, like = kept
        unpacked = codes(packed, self._tiles(shape), self.bits)
        x: Tensor = dequantize(unpacked, *_scales(kept), like.dtype)
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
    """Offset and step of what `Quantized` has kept, or `affine` has made of it."""
    _, zero, step, _ = kept
    return (zero, step) if zero.is_floating_point() else scales(zero, step)


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
