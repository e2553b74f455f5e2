"""How an activation is packed between the forward and the backward pass.

A rule sees an activation as [rows, columns], in the dtype that the layer computes in. Its columns
are the last axis; those of images are the channels. Attention takes elementwise rules alone, and
shows them [heads, tokens, columns] or [batch, tokens, columns of all heads]. `registry` names all
rules; a method in `methods.py` says which rule each kind of layer gets.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from razorctl.errors import UsageError
from razorctl.ops.activation import FUNCTIONS
from razorctl.rules.allocation import largest
from razorctl.rules.packed import Packed, PackedCodes


class Product:
    """Maps columns of an activation to their columns of the weight gradient.

    [rows, c] becomes [anything, c]. The map is linear, and takes each column by itself. For a
    linear layer it is x -> dy^T x.
    """

    def __init__(self, multiply: Callable[[Tensor], Tensor]) -> None:
        self.multiply = multiply

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x)

    def of_ones(self, like: Tensor, rows: int) -> Tensor:
        """The product of one column of ones, [anything, 1]; ones are of the dtype of `like`."""
        return self(like.new_ones(rows, 1))

    def of_codes(self, packed: PackedCodes) -> Tensor | None:
        """The product of what `packed` stands for; None if it needs an unpacked activation."""
        return None


class Rule(ABC):
    """How one activation is packed for backward. The saved bytes never depend on its values.

    prunes: whether elements are left out. elementwise: whether the rule packs elements, so that the
    number of columns may vary.
    """

    prunes: bool = True
    elementwise: bool = True

    @abstractmethod
    def pack(self, x: Tensor) -> Packed:
        """Packs `x` [rows, columns] or, if elementwise, of any shape that the layer shows it."""

    @abstractmethod
    def unpack(self, packed: Any) -> Tensor:
        """The stand-in for x, of its shape and dtype, that the gradient is computed from."""

    def weight_grad(self, product: Product, packed: Any) -> Tensor:
        """dW = product(unpack(packed)), [anything, columns]."""
        return product(self.unpack(packed))

    def function_grad(self, function: str, dy: Tensor, packed: Any) -> Tensor:
        """f'(x) dy, of the shape of dy and x; `function` names f in `ops.activation.FUNCTIONS`."""
        return FUNCTIONS[function].backward(dy, self.unpack(packed).to(dy.dtype))


class Shareable(ABC):
    """A rule whose copy of x also serves the linear layers that a function of x feeds."""

    @abstractmethod
    def of_affine(
        self, packed: Any, weight: Tensor | None, bias: Tensor | None, like: Tensor
    ) -> Packed:
        """The copy of x as a copy of x weight + bias, both [columns], in the dtype of `like`."""

    @abstractmethod
    def of_function(self, packed: Any, function: str) -> Packed:
        """The copy of x as a copy of f(x); `function` names f in `ops.activation.FUNCTIONS`."""


@dataclass(frozen=True)
class Rules:
    """The rules of one layer: `wide` is for activations of more than 16 bits, `narrow` for others.

    narrow is None if no rule meets the byte budget with activations of 16 bits.
    """

    wide: Rule
    narrow: Rule | None

    def of(self, x: Tensor) -> Rule:
        """The rule for an activation of the dtype of `x`; raises UsageError if there is none."""
        if x.element_size() > 2:
            return self.wide
        if self.narrow is None:
            raise UsageError(
                "the ratio cannot be met with activations of 16 bits; the largest that can is "
                f"{largest('narrow'):g}."
            )
        return self.narrow

    @property
    def each(self) -> tuple[Rule, ...]:
        """Every rule once."""
        return (self.wide,) if self.narrow in (None, self.wide) else (self.wide, self.narrow)


def survivors(total: int, density: float) -> int:
    """How many of `total` elements or columns are not pruned: the nearest number, at least 1."""
    return min(total, max(1, round(density * total)))
