"""What survives of an activation between forward and backward.

A rule sees an activation as [rows, columns], the columns being its last axis (of images: the
channels), in the dtype that the layer computes in. Attention, which takes elementwise rules alone,
shows them [heads, tokens, columns] or [batch, tokens, columns of all heads]. `registry` names them
all; a method of `methods.py` says which rule each kind of layer gets.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from razorctl.ops.activation import FUNCTIONS
from razorctl.ops.quantize import dequantize

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
        return self(dequantize(codes, offset, step, dtype))

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
        x = dequantize(codes, offset, step, dtype).flatten(0, 1)
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
