"""The backward pass of a gated MLP in int8, whose hidden activation a is recomputed, in tiles.

x -- gate, up -- a = f(gate) * up -- down -- y

It needs gate, up, a and the gradients of all three, each as large as a. The layer `down` computes
them, a tile at a time. Whole are only a, in codes, and the gradients of gate and up, on a card in
int8. The gradients reach the node of a as a `HeldGradient`. All numbers equal the ones of whole
tensors, but sums over rows are added in another order. As `down` is no output layer, no cost of
int8 is measured.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from razorctl.layers.shared_copies.int8_gradients import HeldGradient, Int8, Int8Gradient, OneHalf
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.gated import gated_grad
from razorctl.ops.gemm import scaled_gemm
from razorctl.ops.int8 import int8_rows
from razorctl.ops.linear_again import BITS, outer, row_operands
from razorctl.ops.op import FewBitCopy
from razorctl.ops.quantize import empty_copy
from razorctl.rules.derived import Cell, DerivedFunction, DerivedLinear, DerivedView, form_of
from razorctl.rules.packed import TILE, Packed, PackedCodes, in_codes

_whole = False
MOST = 2**23  # elements of a tile of a, at least; twice as many make two tiles


@contextmanager
def as_compiled(compiled: bool) -> Iterator[None]:
    """Inside the block there are no tiles if `compiled`, as in a compiled program; for traces."""
    global _whole
    before, _whole = _whole, compiled
    try:
        yield
    finally:
        _whole = before


class Gradients(NamedTuple):
    """The form of the gradient of a: the cell of gate, and the gradients of gate and up."""

    gate: Cell
    parts: tuple[Tensor, ...]


def parts_of(dy: Tensor, gate: Packed) -> tuple[Tensor, ...]:
    """The gradients of gate and up that dy holds for this gate; nothing if it holds none."""
    form = dy.form if isinstance(dy, HeldGradient) else None
    return form.parts if isinstance(form, Gradients) and form.gate is gate.cell else ()  # type: ignore[attr-defined]


class Output(NamedTuple):
    """x W^T + b in int8, some rows at a time: codes and scales of x and W, and b."""

    x: Tensor
    x_scale: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layer: DerivedLinear) -> "Output":
        weight, bias = layer.used_tensors()
        return cls(*row_operands(*form_of(layer.sources[0]), weight), bias)

    def halves(self) -> list["Output"]:
        """The two halves of the columns."""
        biases = (None, None) if self.bias is None else self.bias.chunk(2)
        parts = zip(self.weight.chunk(2), self.scale.chunk(2), biases, strict=True)
        return [Output(self.x, self.x_scale, *part) for part in parts]

    def rows(self, part: slice, dtype: torch.dtype) -> Tensor:
        scale = self.x_scale[part]
        terms = outer(self.bias, scale)
        return scaled_gemm(self.x[part], self.weight, scale, self.scale, dtype, *terms)


class _Gradient:
    """A gradient, filled a tile after the other; int8: whether as an int8 copy."""

    def __init__(self, rows: int, int8: bool) -> None:
        self._rows, self._int8, self._whole = rows, int8, list[Tensor]()

    def put(self, part: slice, gradient: Tensor) -> None:
        tensors = [*int8_rows(gradient)] if self._int8 else [gradient]
        of_rows, of_columns = tensors[:2], tensors[2:]
        if not self._whole:
            self._whole = [t.new_empty(self._rows, *t.shape[1:]) for t in of_rows]
            self._whole += [torch.zeros_like(t) for t in of_columns]
        for whole, some in zip(self._whole, of_rows, strict=False):
            whole[part] = some
        if of_columns:
            self._whole[2] += of_columns[0]
            self._whole[3] = torch.maximum(self._whole[3], of_columns[1])

    def of(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The gradient in the shape of an activation."""
        whole = self._whole
        return Int8Gradient(shape, dtype, Int8(*whole)) if self._int8 else whole[0].view(shape)


class Hidden(NamedTuple):
    """The a of a gated MLP.

    Args:
        a: [rows, columns].
        layers: gate and up, or the layer that computes both side by side.
        gate_first: whether gate is the first half of that layer's output.
    """

    a: DerivedFunction
    layers: tuple[DerivedLinear, ...]
    gate_first: bool = True

    def run(
        self, gemms: Any, shape: torch.Size, dtype: torch.dtype
    ) -> tuple[Tensor, list[PackedCodes]]:
        """The gradient of a, in a shape and a dtype, and a in codes.

        gemms: the `linear.Gemms` of `down`.
        """
        (rows, columns), name = self.a.shape, self.a.function
        outputs, joined = [Output.of(layer) for layer in self.layers], len(self.layers) == 1
        outputs = outputs[0].halves() if joined else outputs
        outputs[1] = outputs[1]._replace(x=outputs[0].x, x_scale=outputs[0].x_scale)  # the same
        grads = [_Gradient(rows, layer.handed) for layer in self.layers]
        a = empty_copy(outputs[0].x, rows, columns, BITS, TILE)
        step = math.ceil(rows / (rows * columns // MOST) / TILE) * TILE  # whole tiles of codes
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            both = [output.rows(part, self.a.dtype) for output in outputs]
            gate, up = both if self.gate_first else both[::-1]
            del both
            codes, *scales = in_codes(FUNCTIONS[name].forward(gate).mul_(up)).copy[:3]
            a[0].view(rows, columns)[part] = codes.view(-1, columns)
            for whole, some in zip(a[1:], scales, strict=True):
                whole[start // TILE :][: len(some)] = some
            del codes, scales, some
            made = [*gated_grad(gemms.input_grad(part), gate.to(dtype), up.to(dtype), name)]
            del gate, up
            if joined:
                made = [torch.cat(made if self.gate_first else made[::-1], 1)]
            for gradient in grads:
                gradient.put(part, made.pop(0))
        form = Gradients(self.a.sources[0].cell, self._parts(grads, shape, dtype))  # type: ignore[attr-defined]
        dx = HeldGradient(shape, dtype, form, gemms.input_grad, outputs[0].x.device)
        return dx, [PackedCodes(self.a.shape, self.a.dtype, FewBitCopy(*a, BITS, TILE))]

    def _parts(
        self, grads: list[_Gradient], shape: torch.Size, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """The gradients of gate and up."""
        if len(grads) == 2:
            return tuple(gradient.of(shape, dtype) for gradient in grads)
        whole = grads[0].of(torch.Size((*shape[:-1], 2 * shape[-1])), dtype)
        halves = [OneHalf(whole, number) for number in ((0, 1) if self.gate_first else (1, 0))]
        return tuple(HeldGradient(shape, dtype, h, h.values, whole.device) for h in halves)


def hidden(copy: Packed | None, gemms: Any) -> Hidden | None:
    """The `Hidden` of a copy, if that is a large a of a gated MLP in int8; else None.

    None in a compiled program, where no gradient can be a `HeldGradient`.
    """
    if torch.compiler.is_compiling() or not (gemms.weight_int8 and gemms.input_int8):
        return None
    if type(copy) is not DerivedFunction or not copy.sources[1:]:
        return None
    (rows, columns), parts, gate_first = copy.shape, list(copy.sources), True
    if rows * columns < 2 * MOST or _whole:
        return None
    if all(isinstance(part, DerivedView) for part in parts):
        views: Any = parts
        offsets, lies = [view.offset for view in views], {view.strides for view in views}
        if sorted(offsets) != [0, columns] or lies != {(2 * columns, 1)}:
            return None
        parts, gate_first = [views[0].sources[0]], offsets[0] == 0
    layers = tuple(part for part in parts if type(part) is DerivedLinear and part.int8)
    return Hidden(copy, layers, gate_first) if len(layers) == len(parts) else None
