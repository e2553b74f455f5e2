"""What survives of an activation between forward and backward.

A rule sees an activation as [rows, columns], the columns being its last axis (of images: the
channels), in the dtype that the layer computes in. Attention, which takes elementwise rules alone,
shows them [heads, tokens, columns] or [batch, tokens, columns of all heads]. `registry` names them
all; a method of `methods.py` says which rule each kind of layer gets.
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

    def of_codes(self, packed: PackedCodes) -> Tensor | None:
        """The product of what codes stand for; None if it takes nothing but values."""
        return None


class Rule(ABC):
    """How one activation is packed for backward. The saved bytes depend on its shape alone.

    prunes: whether elements are left out. elementwise: whether elements are packed whatever the
    number of columns.
    """

    prunes: bool = True
    elementwise: bool = True

    @abstractmethod
    def pack(self, x: Tensor) -> Packed:
        """What to save of `x` [rows, columns] or, if elementwise, of any shape."""

    @abstractmethod
    def unpack(self, packed: Any) -> Tensor:
        """The stand-in for x, of its shape and dtype, that the gradient is computed from."""

    def weight_grad(self, product: Product, packed: Any) -> Tensor:
        """dW = product(unpack(packed)), [anything, columns]."""
        return product(self.unpack(packed))

    def function_grad(self, function: str, dy: Tensor, packed: Any) -> Tensor:
        """f'(x) dy for the activation function f by that name and dy of the shape of x."""
        return FUNCTIONS[function].backward(dy, self.unpack(packed).to(dy.dtype))


class Shareable(ABC):
    """A rule whose copy of x also serves the linear layers that a function of x feeds."""

    @abstractmethod
    def of_affine(
        self, packed: Any, weight: Tensor | None, bias: Tensor | None, like: Tensor
    ) -> Packed:
        """What was packed of x, as packed of x weight + bias [columns] in the dtype of `like`."""

    @abstractmethod
    def of_function(self, packed: Any, function: str) -> Packed:
        """What was packed of x, as packed of f(x), f by its name in `ops.activation`."""


@dataclass(frozen=True)
class Rules:
    """Those of one layer: `wide` for activations of more than 16 bits, `narrow` for those of 16.

    narrow is None where no rule would meet the byte budget with them.
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
        """All that there are."""
        return (self.wide,) if self.narrow in (None, self.wide) else (self.wide, self.narrow)


def survivors(total: int, density: float) -> int:
    """How many of `total` elements or columns a density keeps: the nearest number, at least 1."""
    return min(total, max(1, round(density * total)))
