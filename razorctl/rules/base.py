"""How an activation is packed between the forward and the backward pass.

A rule sees an activation as [rows, columns], in the dtype that the layer computes in. Columns are
the last axis, or the channels of images. Attention takes only elementwise rules, and passes them
[heads, tokens, columns] or [batch, tokens, columns of all heads]. `registry` names all rules. A
method in `methods.py` chooses a rule for each kind of layer.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from razorctl.ops.images import normalized_images, pixels
from razorctl.rules.packed import Packed
from razorctl.sampling.samplers import Sampler


class Rule(ABC):
    """How one activation is packed for backward. The stored bytes never depend on its values.

    Attributes:
        prunes: whether elements are left out.
        elementwise: whether the rule packs elements, so that the number of columns may vary.
        again: whether the activation is recomputed in the backward pass if possible, and packed
            only otherwise.
        draws: whether a sampler draws what is packed.
        tiled: whether each column is packed by itself, so that activations side by side can be
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
        """Packs `x` [rows, columns], or a tensor of any shape if elementwise."""

    def pack_images(
        self, x: Tensor, dtype: torch.dtype, mean: Tensor | None = None, rstd: Tensor | None = None
    ) -> Packed:
        """Packs the pixels of `x` [batch, channels, ...] as rows, in `dtype`.

        Args:
            x: images.
            dtype: of the rows.
            mean, rstd: if given, (x - mean) * rstd is packed; see `ops.images.normalized`.
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
        """The norm of `x`, 1 / std [rows, 1], and x_hat as the tensors that `packed` takes.

        Only rules with `fuses` implement it. See `ops.norm.norm_quantize`.

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
        """f(x), of the shape of x [..., columns], and x as the tensors that `packed` takes.

        Only rules with `fuses` implement it. function: a name in `ops.functions.FUNCTIONS`.
        """
        raise NotImplementedError

    def packed(self, shape: torch.Size, dtype: torch.dtype, *tensors: Tensor) -> Packed:
        """The `Packed` for tensors of `pack_norm` or `pack_function`; shape: [rows, columns]."""
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
        """Both rules, or one if they are the same."""
        return (self.wide,) if self.narrow is self.wide else (self.wide, self.narrow)


def survivors(total: int, density: float) -> int:
    """The number of `total` elements or columns that stay: density * total rounded, at least 1."""
    return min(total, max(1, round(density * total)))
