"""What is saved of one activation between forward and backward: a small dataclass for each form.

Each knows the shape and the dtype of the activation that it stands for, and which of its fields are
tensors: those alone go where autograd saves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """Base. TENSORS: the names of the fields that are tensors, or None."""

    TENSORS: ClassVar[tuple[str, ...]] = ()
    shape: torch.Size
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What autograd is to save."""
        return tuple(getattr(self, name) for name in self.TENSORS)

    def holding(self, tensors: Sequence[Tensor | None]) -> Self:
        """The same with other `tensors`."""
        return self.replaced(**dict(zip(self.TENSORS, tensors, strict=True)))

    def replaced(self, **changes: Any) -> Self:
        """`dataclasses.replace`, in a way that torch.compile of torch 2.11 can trace."""
        names = type(self).__match_args__
        return type(self)(*[changes[n] if n in changes else getattr(self, n) for n in names])


@dataclass(frozen=True)
class PackedValues(Packed):
    """All elements, in the dtype of `values`."""

    TENSORS = ("values",)
    values: Tensor


@dataclass(frozen=True)
class PackedElements(Packed):
    """Some elements, `values` [k] in order of position, and a bit each in `bitmap`, uint8."""

    TENSORS = ("values", "bitmap")
    values: Tensor
    bitmap: Tensor


@dataclass(frozen=True)
class PackedColumns(Packed):
    """The columns [rows, s] numbered `index` [s], drawn with `probability` [s]; None if chosen."""

    TENSORS = ("columns", "index", "probability")
    columns: Tensor
    index: Tensor
    probability: Tensor | None


@dataclass(frozen=True)
class PackedCentered(Packed):
    """The mean [..., 1, columns] over rows, and what another rule packed of the rest."""

    mean: Tensor
    rest: Packed

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.mean, *self.rest.tensors

    def holding(self, tensors: Sequence[Tensor | None]) -> Self:
        return self.replaced(mean=tensors[0], rest=self.rest.holding(tensors[1:]))


@dataclass(frozen=True)
class PackedCodes(Packed):
    """Codes of `bits` each, uint8, as `ops.quantize` packs them in blocks of rows.

    zero_point, scale: of each column of a block, [blocks, columns]. bias: [columns], to be added to
    what the codes stand for, None for 0. function: of `ops.activation.FUNCTIONS`, then to be
    applied, None for none.
    """

    TENSORS = ("packed", "zero_point", "scale", "bias")
    packed: Tensor
    zero_point: Tensor
    scale: Tensor
    bits: int
    bias: Tensor | None = None
    function: str | None = None


@dataclass(frozen=True)
class PackedIntervals(Packed):
    """Numbers of `bits` each, uint8, of the intervals of `ops.buckets` for a function."""

    TENSORS = ("packed",)
    packed: Tensor
    bits: int
    function: str
