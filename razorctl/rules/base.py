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

import torch
from torch import Tensor

from razorctl.errors import UsageError
from razorctl.ops.activation import FUNCTIONS
from razorctl.ops.images import normalized, pixels, unrolled
from razorctl.ops.norm import norm_grad_reference
from razorctl.rules.allocation import largest
from razorctl.rules.packed import Packed, PackedCodes
from razorctl.sampling.samplers import Sampler


class Product:
    """Maps columns of an activation to their columns of the weight gradient.

    [rows, c] becomes [anything, c]. The map is linear, and takes each column by itself. For a
    linear layer it is x -> dy^T x. bias_grad, image_grad: the gradients of the bias and of images,
    where one call makes them too.
    """

    bias_grad: Tensor | None = None
    image_grad: Tensor | None = None

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

    def of_images(self, rule: "Rule", packed: Any) -> Tensor | None:
        """The product [..., c] of what `rule` packed of images; None if it takes rows of pixels."""
        return None


class Rule(ABC):
    """How one activation is packed for backward. The kept bytes never depend on its values.

    prunes: whether elements are left out. elementwise: whether the rule packs elements, so that the
    number of columns may vary. sampler: what draws columns, and learns which; None without draws.
    """

    prunes: bool = True
    elementwise: bool = True
    sampler: Sampler | None = None

    @abstractmethod
    def pack(self, x: Tensor) -> Packed:
        """Packs `x` [rows, columns] or, if elementwise, of any shape that the layer shows it."""

    @abstractmethod
    def unpack(self, packed: Any) -> Tensor:
        """The stand-in for x, of its shape and dtype, that the gradient is computed from."""

    def pack_images(
        self, x: Tensor, dtype: torch.dtype, mean: Tensor | None = None, rstd: Tensor | None = None
    ) -> Packed:
        """Packs the pixels of `x` [batch, channels, ...] as rows, in `dtype`.

        mean, rstd: those of (x - mean) * rstd, see `ops.images.normalized`.
        """
        return self.pack(pixels(normalized(x, mean, rstd)).to(dtype))

    def unpack_images(
        self, packed: Any, shape: torch.Size, dtype: torch.dtype, form: torch.memory_format
    ) -> Tensor:
        """The stand-in for images of `shape`, in `dtype` and in the memory format `form`."""
        x = unrolled(self.unpack(packed).to(dtype), shape)
        return x.contiguous(memory_format=form)

    def weight_grad(self, product: Product, packed: Any) -> Tensor:
        """dW = product(unpack(packed)), [anything, columns], or [..., columns] of images."""
        grad = product.of_images(self, packed)
        return product(self.unpack(packed)) if grad is None else grad

    def function_grad(self, function: str, dy: Tensor, packed: Any) -> Tensor:
        """f'(x) dy, of the shape of dy and x; `function` names f in `ops.activation.FUNCTIONS`."""
        return FUNCTIONS[function].backward(dy, self.unpack(packed).to(dy.dtype))

    def norm_grad(
        self,
        dy: Tensor,
        packed: Any,
        weight: Tensor | None,
        rstd: Tensor,
        centers: bool,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`ops.norm.norm_grad_reference` with the x_hat that was packed."""
        return norm_grad_reference(dy, self.unpack(packed), weight, rstd, centers, residual)


class Shareable(ABC):
    """A rule whose copy of x also serves the linear layers that a function of x feeds.

    fuses: whether one operation can compute the function and make the copy.
    """

    fuses: bool

    @abstractmethod
    def pack_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centers: bool,
        dtype: torch.dtype,
        mean: Tensor | None = None,
        rstd: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The norm of `x` [..., columns] in `dtype`, 1 / std [rows, 1], and x_hat as packed.

        See `ops.norm.norm_quantize`. The last tensors are those that `copy` takes. mean, rstd: the
        statistics of x, if they are known.
        """

    @abstractmethod
    def pack_function(self, x: Tensor, function: str) -> tuple[Tensor, ...]:
        """f(x), of the shape of x [..., columns], and the tensors of the copy of x.

        function: as in `Rule.function_grad`.
        """

    @abstractmethod
    def function_grad_int8(
        self, function: str, dy: Tensor, packed: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `ops.int8.int8_rows` makes of `Rule.function_grad`."""

    @abstractmethod
    def norm_grad_int8(
        self,
        dy: Tensor,
        packed: Any,
        weight: Tensor | None,
        rstd: Tensor,
        centers: bool,
        residual: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """`Rule.norm_grad`, and the int8 copy of its dx; see `ops.norm.norm_grad_int8`."""

    @abstractmethod
    def copy(self, shape: torch.Size, dtype: torch.dtype, *tensors: Tensor) -> Packed:
        """What was packed of an activation [rows, columns]."""

    @abstractmethod
    def of_affine(
        self, packed: Any, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
    ) -> Packed:
        """The copy of x as a copy of x weight + bias, both [columns], in a dtype."""

    @abstractmethod
    def of_function(self, packed: Any, function: str) -> Packed | None:
        """The copy of x as a copy of f(x); `function` names f in `ops.activation.FUNCTIONS`.

        None if the copy is one of a function already.
        """

    @abstractmethod
    def of_gated(self, gate: Any, up: Any, function: str) -> Packed:
        """The copies of two activations as a copy of f(gate) * up; `function` as above."""


@dataclass(frozen=True)
class Rules:
    """The rules of one layer: `wide` is for activations of more than 16 bits, `narrow` for others.

    narrow is None if no rule meets the byte budget with activations of 16 bits.
    """

    wide: Rule
    narrow: Rule | None

    def of(self, dtype: torch.dtype) -> Rule:
        """The rule for activations of a dtype; raises UsageError if there is none."""
        if dtype.itemsize > 2:
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
