"""How an activation is packed between the forward and the backward pass.

A rule sees an activation as [rows, columns], in the dtype that the layer computes in. Its columns
are the last axis; those of images are the channels. Attention takes elementwise rules alone, and
shows them [heads, tokens, columns] or [batch, tokens, columns of all heads]. `registry` names all
rules; a method in `methods.py` says which rule each kind of layer gets.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from razorctl.ops.images import normalized_images, pixels
from razorctl.rules.packed import Packed
from razorctl.sampling.samplers import Sampler


class Rule(ABC):
    """How one activation is packed for backward. The kept bytes never depend on its values.

    Attributes:
        prunes: whether elements are left out.
        elementwise: whether the rule packs elements, so that the number of columns may vary.
        again: whether the activation is made again in the backward pass where that can be, and
            packed only elsewhere.
        draws: whether a sampler draws what is packed.
        tiled: whether each column is packed by itself, so that activations side by side may be
            packed as one.
        fuses: whether one operation can compute a norm or an activation function and pack its
            input.
        sampler: the sampler of a rule that draws.
    """

    prunes: bool = True
    elementwise: bool = True
    draws: bool = False
    again: bool = False
    tiled: bool = False
    fuses: bool = False
    sampler: Sampler | None = None

    @abstractmethod
    def pack(self, x: Tensor) -> Packed:
        """Packs `x` [rows, columns] or, if elementwise, of any shape that the layer shows it."""

    def pack_images(
        self, x: Tensor, dtype: torch.dtype, mean: Tensor | None = None, rstd: Tensor | None = None
    ) -> Packed:
        """Packs the pixels of `x` [batch, channels, ...] as rows, in `dtype`.

        Args:
            x: images.
            dtype: of the rows.
            mean, rstd: make it pack (x - mean) * rstd, see `ops.images.normalized`.
        """
        return self.pack(pixels(normalized_images(x, mean, rstd)).to(dtype))

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
        """The norm of `x`, 1 / std [rows, 1], and the tensors that `packed` takes of x_hat.

        Only a rule that `fuses` has it. See `ops.norm.norm_quantize`.

        Args:
            x: [..., columns].
            weight, bias: [columns], or None.
            eps: added to the variance.
            centers: whether the mean is subtracted.
            dtype: of the norm.
            mean, rstd: the statistics of x, if they are known.
        """
        raise NotImplementedError

    def pack_function(self, x: Tensor, function: str) -> tuple[Tensor, ...]:
        """f(x), of the shape of x [..., columns], and the tensors that `packed` takes.

        Only a rule that `fuses` has it. function: a name in `ops.functions.FUNCTIONS`.
        """
        raise NotImplementedError

    def packed(self, shape: torch.Size, dtype: torch.dtype, *tensors: Tensor) -> Packed:
        """The `Packed` of the tensors of `pack_norm` or `pack_function`; shape: [rows, columns]."""
        raise NotImplementedError


@dataclass(frozen=True)
class Rules:
    """The rules of one layer: `wide` for activations of more than 16 bits, `narrow` for others."""

    wide: Rule
    narrow: Rule

    def of(self, dtype: torch.dtype) -> Rule:
        """The rule for activations of a dtype."""
        return self.wide if dtype.itemsize > 2 else self.narrow

    @property
    def each(self) -> tuple[Rule, ...]:
        """Every rule once."""
        return (self.wide,) if self.narrow is self.wide else (self.wide, self.narrow)


def survivors(total: int, density: float) -> int:
    """How many of `total` elements or columns are not pruned: the nearest number, at least 1."""
    return min(total, max(1, round(density * total)))
