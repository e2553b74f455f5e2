"""Packed activations: what is stored for backward, as one dataclass per form.

Each has the shape and dtype of the activation that it replaces, and methods that compute gradients.
`TENSORS` names the fields that autograd saves.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from razorctl.ops.activation import activation_grad, activation_grad_int8
from razorctl.ops.columns import column_norms
from razorctl.ops.functions import FUNCTIONS, applied
from razorctl.ops.images import as_they_lie, dequantize_images, unrolled
from razorctl.ops.int8 import int8_rows
from razorctl.ops.norm import gradients, norm_grad, norm_grad_int8
from razorctl.ops.op import FewBitCopy
from razorctl.ops.quantize import dequantize, quantize
from razorctl.ops.topk import topk_unpack
from razorctl.sampling.samplers import Sampler

TILE = 256  # rows of a tile; a zero point and a scale then take an eighth of a bit per element


@dataclass(frozen=True)
class Packed:
    """The base of all forms.

    TENSORS: the names of the fields that are tensors or None. shape, dtype: of the activation.
    elementwise: as in its rule. shareable: whether layers of other kinds use it instead of packing
    a copy by their own rule.
    """

    TENSORS: ClassVar[tuple[str, ...]] = ()
    elementwise: ClassVar[bool] = True
    shareable: ClassVar[bool] = False
    shape: torch.Size
    dtype: torch.dtype

    def values(self) -> Tensor:
        """The approximate activation, for computing gradients."""
        raise NotImplementedError

    def codes(self) -> "PackedCodes":
        """The values [rows, columns] in codes, for a GEMM in int8."""
        return in_codes(self.values())

    def images(self, shape: torch.Size, dtype: torch.dtype, form: torch.memory_format) -> Tensor:
        """The approximate images of `shape`, in `dtype` and in the memory format `form`."""
        return unrolled(self.values().to(dtype), shape).contiguous(memory_format=form)

    def operands(self) -> tuple["Tensor | Packed", ...]:
        """The right factors of the products that the weight gradient consists of.

        Each is some columns of the activation, [rows, c], or a copy of all. The layer computes a
        product [anything, c] with each; a linear layer computes dy^T x.
        """
        return (self,)

    def spread(self, *products: Tensor) -> Tensor:
        """dW [anything, columns] from the products of the `operands`."""
        (dw,) = products
        return dw

    def function_grad(self, function: str, dy: Tensor) -> Tensor:
        """f'(x) dy, in the shape of dy; `function`: f, a name in `ops.functions.FUNCTIONS`."""
        return FUNCTIONS[function].backward(dy, self.values().to(dy.dtype))

    def function_grad_int8(self, function: str, dy: Tensor) -> tuple[Tensor, ...]:
        """The int8 rows of `function_grad`, as `ops.int8.int8_rows` returns them."""
        return int8_rows(self.function_grad(function, dy))

    def norm_grad(
        self,
        dy: Tensor,
        weight: Tensor | None,
        rstd: Tensor,
        centers: bool,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`ops.norm.gradients` with the packed x_hat."""
        return gradients(dy, self.values(), weight, rstd, centers, residual)

    def of_affine(
        self, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
    ) -> "Packed | None":
        """A copy of x weight + bias in a dtype, from this copy of x; None if there is none.

        weight, bias: [columns], or None.
        """
        return None

    def of_function(self, function: str) -> "Packed | None":
        """A copy of f(x), with f as in `function_grad`, from this copy of x; None if impossible."""
        return None

    def of_gated(self, up: "Packed", function: str) -> "Packed | None":
        """A copy of f(x) * up, with f as in `function_grad`; None if there is none."""
        return None

    def changed(self) -> tuple[Any, ...]:
        """The layers whose weight or mask has changed since this was derived from it."""
        return ()

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that autograd saves."""
        return tuple(getattr(self, name) for name in self.TENSORS)

    def saved_by(self, ctx: Any) -> None:
        """Called when an autograd function saves it for backward; ctx: that function's context."""
        if not torch.compiler.is_compiling():
            vars(self).setdefault("_ctx", weakref.ref(ctx))

    @property
    def alive(self) -> bool:
        """Whether the graph that saved it first still exists, if one did."""
        ctx = vars(self).get("_ctx")
        return ctx is None or ctx() is not None

    def holding(self, tensors: Iterator[Tensor | None]) -> Self:
        """A replica that takes its tensors from the iterator, as many as it has."""
        return self.replaced(**dict(zip(self.TENSORS, tensors, strict=False)))

    def replaced(self, **changes: Any) -> Self:
        """`dataclasses.replace` with less host time, or traceable by torch.compile."""
        if torch.compiler.is_compiling():
            names = type(self).__match_args__
            return type(self)(*[changes[n] if n in changes else getattr(self, n) for n in names])
        twin = object.__new__(type(self))
        fields = vars(twin)
        fields.update(vars(self))
        fields.update(changes)
        return twin


@dataclass(frozen=True)
class PackedValues(Packed):
    """All elements, perhaps in a narrower dtype."""

    TENSORS = ("elements",)
    elements: Tensor

    def values(self) -> Tensor:
        return self.elements.to(self.dtype)


@dataclass(frozen=True)
class PackedElements(Packed):
    """Some elements [k] in order of position; `bitmap`: uint8, one bit per element."""

    TENSORS = ("elements", "bitmap")
    elements: Tensor
    bitmap: Tensor

    def values(self) -> Tensor:
        return topk_unpack(self.elements, self.bitmap, list(self.shape))


@dataclass(frozen=True)
class PackedColumns(Packed):
    """Some columns of an activation.

    Args:
        columns: [rows, s].
        index: their numbers, [s].
        probability: with which each was drawn, [s]; None if they were not drawn.
        sampler: has drawn the columns; it learns from their gradient.
        unbiased: whether each column is scaled by 1 / probability.
    """

    TENSORS = ("columns", "index", "probability")
    elementwise = False
    columns: Tensor
    index: Tensor
    probability: Tensor | None
    sampler: Sampler | None = None
    unbiased: bool = False

    def values(self) -> Tensor:
        columns = self._scaled(self.columns)
        return columns.new_zeros(self.shape).index_copy_(1, self.index, columns)

    def operands(self) -> tuple[Tensor | Packed, ...]:
        return (self.columns,)

    def spread(self, *products: Tensor) -> Tensor:
        (dw,) = products
        if self.sampler is not None and self.probability is not None:
            self.sampler.update(self.index, self.probability, column_norms(dw))
        zeros = dw.new_zeros(dw.shape[0], self.shape[1])
        return zeros.index_copy_(1, self.index, self._scaled(dw))

    def _scaled(self, columns: Tensor) -> Tensor:
        if self.probability is None or not self.unbiased:
            return columns
        return (columns / self.probability).to(columns.dtype)


@dataclass(frozen=True)
class PackedCentered(Packed):
    """`mean` [..., 1, columns], the mean over rows, and `rest`, the packed x - mean.

    dW = dy^T (x - mean) + dy^T 1 mean^T for a linear layer; the second term is exact.
    """

    elementwise = False
    mean: Tensor
    rest: Packed

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.mean, *self.rest.tensors

    def holding(self, tensors: Iterator[Tensor | None]) -> Self:
        return self.replaced(mean=next(tensors), rest=self.rest.holding(tensors))

    def values(self) -> Tensor:
        return self.rest.values() + self.mean

    def operands(self) -> tuple[Tensor | Packed, ...]:
        return *self.rest.operands(), self.mean.new_ones(self.shape[0], 1)

    def spread(self, *products: Tensor) -> Tensor:
        *products_of_rest, total = products
        dw = self.rest.spread(*products_of_rest)
        return dw.addcmul(total.view(*dw.shape[:-1], 1), self.mean)


@dataclass(frozen=True)
class PackedCodes(Packed):
    """function(x), for an x that is stored as a few-bit copy.

    function: a name in `ops.functions.FUNCTIONS`, None for x itself.
    """

    shareable = True
    copy: FewBitCopy
    function: str | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        packed, zero_point, scale, *_, bias = self.copy
        return packed, zero_point, scale, bias

    def holding(self, tensors: Iterator[Any]) -> Self:
        packed, zero_point, scale, bias = islice(tensors, 4)
        _, _, _, bits, tile_rows, _ = self.copy
        return self.replaced(copy=FewBitCopy(packed, zero_point, scale, bits, tile_rows, bias))

    def values(self) -> Tensor:
        x = dequantize(self.copy, self.shape[:-1].numel(), self.dtype).view(self.shape)
        return applied(self.function, x)

    def codes(self) -> "PackedCodes":
        return self

    def images(self, shape: torch.Size, dtype: torch.dtype, form: torch.memory_format) -> Tensor:
        if not as_they_lie(self.copy.packed.device, shape, form):
            return super().images(shape, dtype, form)
        return dequantize_images(self.copy, dtype, self.function, list(shape))

    @property
    def plain(self) -> bool:
        """Whether these are codes of the activation itself, without a function or bias."""
        return self.copy.bias is None and self.function is None

    def function_grad(self, function: str, dy: Tensor) -> Tensor:
        if not self.plain:
            return super().function_grad(function, dy)
        return activation_grad(dy, self.copy, function)

    def function_grad_int8(self, function: str, dy: Tensor) -> tuple[Tensor, ...]:
        if not self.plain:
            return super().function_grad_int8(function, dy)
        return activation_grad_int8(dy, self.copy, function)

    def norm_grad(
        self,
        dy: Tensor,
        weight: Tensor | None,
        rstd: Tensor,
        centers: bool,
        residual: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return norm_grad(dy, self.copy, weight, rstd, centers, residual)

    def norm_grad_int8(
        self,
        dy: Tensor,
        weight: Tensor | None,
        rstd: Tensor,
        centers: bool,
        residual: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """`norm_grad`, and the int8 copy of its dx; see `ops.norm.norm_grad_int8`."""
        return norm_grad_int8(dy, self.copy, weight, rstd, centers, residual)

    def of_affine(
        self, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
    ) -> "PackedCodes":
        packed, zero_point, scale, bits, tile_rows, _ = self.copy
        scale = scale if weight is None else scale * weight.float()
        copy = FewBitCopy(packed, zero_point, scale, bits, tile_rows, bias)
        return self.replaced(dtype=dtype, copy=copy)

    def of_function(self, function: str) -> "PackedCodes | None":
        return self.replaced(function=function) if self.function is None else None

    def of_gated(self, up: Packed, function: str) -> "PackedGated":
        return PackedGated(self.shape, self.dtype, self, up, function)


def in_codes(x: Tensor) -> PackedCodes:
    """x [rows, columns] in codes of 8 bits, for int8 GEMMs."""
    return PackedCodes(x.shape, x.dtype, FewBitCopy(*quantize(x, 8, TILE), 8, TILE))


@dataclass(frozen=True)
class PackedGated(Packed):
    """function(gate) * up from two copies; `function`: a name in `ops.functions.FUNCTIONS`."""

    shareable = True
    gate: Packed
    up: Packed
    function: str

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return *self.gate.tensors, *self.up.tensors

    def holding(self, tensors: Iterator[Tensor | None]) -> Self:
        return self.replaced(gate=self.gate.holding(tensors), up=self.up.holding(tensors))

    def values(self) -> Tensor:
        return FUNCTIONS[self.function].forward(self.gate.values()).mul_(self.up.values())
