"""What is kept of one activation between forward and backward: a small dataclass for each form.

Each has the shape and the dtype of the activation that it stands for. It names the fields that are
tensors; autograd keeps those alone.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """The base of all forms.

    TENSORS: the names of the fields that are tensors or None. shape, dtype: of the activation.
    """

    TENSORS: ClassVar[tuple[str, ...]] = ()
    shape: torch.Size
    dtype: torch.dtype

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What autograd is to keep."""
        return tuple(getattr(self, name) for name in self.TENSORS)

    def saved_by(self, ctx: Any) -> None:
        """Called when the context of an autograd function keeps it for the backward pass."""
        if not torch.compiler.is_compiling():
            vars(self).setdefault("_ctx", weakref.ref(ctx))

    @property
    def alive(self) -> bool:
        """Whether the graph that kept it first is still there, if one did."""
        ctx = vars(self).get("_ctx")
        return ctx is None or ctx() is not None

    def holding(self, tensors: Sequence[Tensor | None]) -> Self:
        """The same form with `tensors` in place of its own."""
        if torch.compiler.is_compiling():
            return self.replaced(**dict(zip(self.TENSORS, tensors, strict=True)))
        made = object.__new__(type(self))
        fields = vars(made)
        fields.update(vars(self))
        fields.update(zip(self.TENSORS, tensors, strict=True))
        return made

    def replaced(self, **changes: Any) -> Self:
        """`dataclasses.replace`, in less of the host's time, or as torch.compile can trace it."""
        if torch.compiler.is_compiling():
            names = type(self).__match_args__
            return type(self)(*[changes[n] if n in changes else getattr(self, n) for n in names])
        made = object.__new__(type(self))
        fields = vars(made)
        fields.update(vars(self))
        fields.update(changes)
        return made


@dataclass(frozen=True)
class PackedValues(Packed):
    """All elements, in the dtype of `values`."""

    TENSORS = ("values",)
    values: Tensor


@dataclass(frozen=True)
class PackedElements(Packed):
    """Some elements: `values` [k] in order of position, and `bitmap`, uint8, a bit per element."""

    TENSORS = ("values", "bitmap")
    values: Tensor
    bitmap: Tensor


@dataclass(frozen=True)
class PackedColumns(Packed):
    """Some columns [rows, s] and their numbers, `index` [s].

    probability: of each to be drawn, [s]; None if the columns were not drawn.
    """

    TENSORS = ("columns", "index", "probability")
    columns: Tensor
    index: Tensor
    probability: Tensor | None


@dataclass(frozen=True)
class PackedCentered(Packed):
    """`mean` [..., 1, columns] over rows; `rest` is what another rule packed of x - mean."""

    mean: Tensor
    rest: Packed

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.mean, *self.rest.tensors

    def holding(self, tensors: Sequence[Tensor | None]) -> Self:
        return self.replaced(mean=tensors[0], rest=self.rest.holding(tensors[1:]))


@dataclass(frozen=True)
class PackedCodes(Packed):
    """Codes of `bits` each, uint8, as `ops.quantize` packs them in tiles of `tile_rows` rows.

    The activation is function(scale * (code - zero_point / 8) + bias). zero_point, scale: of each
    tile, [tiles, columns]. bias: [columns], None for 0. function: a name in
    `ops.activation.FUNCTIONS`, None for none.
    """

    TENSORS = ("packed", "zero_point", "scale", "bias")
    packed: Tensor
    zero_point: Tensor
    scale: Tensor
    bits: int
    tile_rows: int
    bias: Tensor | None = None
    function: str | None = None


@dataclass(frozen=True)
class PackedGated(Packed):
    """function(gate) * up of two copies; `function` names one in `ops.activation.FUNCTIONS`."""

    gate: Packed
    up: Packed
    function: str

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return *self.gate.tensors, *self.up.tensors

    def holding(self, tensors: Sequence[Tensor | None]) -> Self:
        first = len(self.gate.tensors)
        gate, up = self.gate.holding(tensors[:first]), self.up.holding(tensors[first:])
        return self.replaced(gate=gate, up=up)


@dataclass(frozen=True)
class PackedIntervals(Packed):
    """The numbers of the intervals of `ops.buckets` for `function`, `bits` each, uint8."""

    TENSORS = ("packed",)
    packed: Tensor
    bits: int
    function: str
