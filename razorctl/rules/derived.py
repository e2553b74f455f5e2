"""Derived activations: recomputed in the backward pass from copies of other activations.

A derived activation holds its sources: copies, weights, masks. A backward pass computes it once,
for the first layer that reads it, and frees it after the last. A layer that reads it for an int8
GEMM leaves it in codes of 8 bits, which give the derivative of an activation function too.

x -- norm -- y -- qkv -- q, k, v -- attention -- o -- proj     the copy of y gives q, k, v and o;
       y -- fc1 -- h -- GELU -- a -- fc2                 the copy of another norm gives h and a

Autograd saves the sources, and raises an error if one has changed since. In a compiled program
every reader recomputes; the compiler merges equal computations.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from razorctl.ops.cast import cast_weight
from razorctl.ops.dropout import dropout_backward
from razorctl.ops.functions import FUNCTIONS, applied
from razorctl.ops.gemm import COPY_ROWS
from razorctl.ops.kernels import on_cpu
from razorctl.ops.linear_again import BITS, linear_again, linear_copy_again
from razorctl.ops.op import FewBitCopy
from razorctl.ops.topk import unpack_bits
from razorctl.rules.packed import Packed, PackedCodes, in_codes


class Cell:
    """The value of a derived activation while layers of a backward pass still need it.

    readers: the number of layers that saved the activation. left: how many of them have not read
    the value in this backward pass.
    """

    def __init__(self) -> None:
        self.readers = self.left = 0
        self.value: Any = None

    def read(self, make: Callable[[], Any]) -> Any:
        """The value; the last reader removes it from the cell."""
        value = make() if self.value is None else self.value
        self.left -= 1
        self.value = value if self.left > 0 else None
        if self.left <= 0:
            self.left = self.readers  # for another backward pass of the same graph
        return value

    def take(self, make: Callable[[], Any]) -> Any:
        """The value, for a reader that is always the last."""
        self.left = 1
        return self.read(make)


class Used(NamedTuple):
    """A weight or a mask that a layer used, with the version that it had then."""

    tensor: "weakref.ref[Tensor]"
    version: int
    layer: Any

    def changed(self) -> bool:
        """Whether it has been changed in place since."""
        tensor = self.tensor()
        return tensor is not None and tensor._version != self.version


@dataclass(frozen=True)
class Derived(Packed):
    """The base of derived activations.

    Args:
        sources: the copies that it is recomputed from.
        others: other tensors for that; each may be None.
        cell: holds the value for all replicas of this object. None in a compiled program.
        used: the layer that an error names.
    """

    shareable: ClassVar[bool] = True
    lasting: ClassVar[bool] = True  # whether it can be recomputed at any time
    sources: tuple[Packed, ...]
    others: tuple[Tensor | None, ...] = ()
    cell: Cell | None = field(default=None, compare=False)
    used: "Used | None" = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.cell is None and not torch.compiler.is_compiling():
            object.__setattr__(self, "cell", Cell())

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return *self.others, *[t for source in self.sources for t in source.tensors]

    @property
    def narrow(self) -> bool:
        """Whether computing from values is faster than from codes, as on a CPU in 16 bits."""
        first = next(t for t in self.tensors if t is not None)
        return on_cpu(first.device) and self.dtype.itemsize < 4

    def holding(self, tensors: Iterator[Tensor | None]) -> Self:
        others = tuple(islice(tensors, len(self.others)))
        sources = tuple([source.holding(tensors) for source in self.sources])
        return self.replaced(others=others, sources=sources)

    def changed(self) -> tuple[Any, ...]:
        layers = [layer for source in self.sources for layer in source.changed()]
        return (*layers, self.used.layer) if self.used and self.used.changed() else tuple(layers)

    def using(self, tensor: Tensor | None, layer: Any) -> Self:
        """A replica that watches a layer's weight or mask among `others` for changes."""
        if tensor is None or torch.compiler.is_compiling():
            return self
        return self.replaced(used=Used(weakref.ref(tensor), tensor._version, layer))

    def saved_by(self, ctx: Any) -> None:
        super().saved_by(ctx)
        if self.cell is None:
            return
        if not self.cell.readers:
            for source in self.sources:
                source.saved_by(ctx)
        self.cell.readers += 1
        self.cell.left += 1

    def values(self) -> Tensor:
        value = self._read(self.make)
        return self._shaped(value.values() if isinstance(value, PackedCodes) else value)

    def codes(self) -> PackedCodes:
        value = self._read(self.make_codes)
        return value if isinstance(value, PackedCodes) else in_codes(self._shaped(value))

    def _read(self, make: Callable[[], Tensor | PackedCodes]) -> Tensor | PackedCodes:
        """The value in the form that its first reader computed; `make` computes it for this one."""
        value: Tensor | PackedCodes = make() if self.cell is None else self.cell.read(make)
        return value

    def function_grad(self, function: str, dy: Tensor) -> Tensor:
        value = self._read(self.make)
        if isinstance(value, PackedCodes):
            return value.function_grad(function, dy)
        return FUNCTIONS[function].backward(dy, self._shaped(value).to(dy.dtype))

    def function_grad_int8(self, function: str, dy: Tensor) -> tuple[Tensor, ...]:
        return self.codes().function_grad_int8(function, dy)

    def make_codes(self) -> PackedCodes:
        """Computes the activation in codes."""
        value = self.make()
        return value if isinstance(value, PackedCodes) else in_codes(self._shaped(value))

    def _shaped(self, x: Tensor) -> Tensor:
        """The activation in the shape and dtype of this object."""
        return (x if x.shape == self.shape else x.reshape(self.shape)).to(self.dtype)

    def make(self) -> Tensor | PackedCodes:
        """Computes the activation; returns codes if it comes in codes."""
        raise NotImplementedError

    def rows(self, dtype: torch.dtype) -> "Derived":
        """The activation as [rows, columns] in a dtype."""
        shape = torch.Size((self.shape[:-1].numel(), self.shape[-1]))
        return self.replaced(shape=shape, dtype=dtype)

    def of_function(self, function: str) -> "Derived":
        return DerivedFunction(self.shape, self.dtype, (self,), function=function)

    def of_gated(self, up: Packed, function: str) -> "Derived":
        return DerivedFunction(self.shape, self.dtype, (self, up), function=function)


@dataclass(frozen=True)
class DerivedCopy(Derived):
    """Another activation in a new shape or dtype."""

    def make(self) -> Tensor:
        return self.sources[0].values().reshape(self.shape)


@dataclass(frozen=True)
class DerivedView(Derived):
    """A view of another activation.

    Args:
        strides, offset: of the view, in elements.
        whole: the strides of the activation.
    """

    strides: tuple[int, ...] = ()
    offset: int = 0
    whole: tuple[int, ...] = ()

    def make(self) -> Tensor:
        x = _laid(self.sources[0].values(), self.whole)
        return x.as_strided(self.shape, self.strides, self.offset)

    def rows(self, dtype: torch.dtype) -> Derived:
        # An axis of one element may have any stride.
        steps = [step for n, step in zip(self.shape[:-1], self.strides, strict=False) if n > 1]
        return super().rows(dtype).replaced(strides=(*(steps or [1])[-1:], self.strides[-1]))


@dataclass(frozen=True)
class DerivedLinear(Derived):
    """y = x W^T + b, [rows, out]. others: W in the layer's shape, and b or None.

    Args:
        matrix: converts W from the layer's shape to [out, in].
        int8: whether the GEMM runs in int8.
        handed: whether the layer takes the gradient of y as an int8 copy.
        gather: called with W before it is read.
    """

    matrix: Callable[[Tensor], Tensor] | None = None
    int8: bool = False
    handed: bool = False
    gather: Callable[[Tensor], None] | None = None

    def make(self) -> Tensor:
        (source,), (weight, bias) = self.sources, self.used_tensors()
        if self.int8:
            return linear_again(*form_of(source), weight, bias, self.dtype)
        x = source.values().to(self.dtype).reshape(-1, weight.shape[1])
        y = x @ cast_weight(weight, self.dtype).t()
        return y if bias is None else y.add_(bias)

    def make_codes(self) -> PackedCodes:
        if not self.int8:
            return super().make_codes()
        (source,), (weight, bias) = self.sources, self.used_tensors()
        copy = linear_copy_again(*form_of(source), weight, bias, self.dtype)
        shape = torch.Size((copy[0].numel() // weight.shape[0], weight.shape[0]))
        return PackedCodes(shape, self.dtype, FewBitCopy(*copy, BITS, COPY_ROWS))

    def function_grad(self, function: str, dy: Tensor) -> Tensor:
        if self.cell is None and self.int8 and not self.narrow:  # f(x) comes from these codes, too
            return self.make_codes().function_grad(function, dy)
        return super().function_grad(function, dy)

    def used_tensors(self) -> tuple[Tensor, Tensor | None]:
        """W [out, in] and b."""
        weight, bias = self.others
        assert weight is not None
        assert self.matrix is not None
        if self.gather is not None:
            self.gather(weight)
        return self.matrix(weight), bias


def apart(copy: Packed) -> Packed | None:
    """A replica that shares no value with other readers; None if that cannot be."""
    if not isinstance(copy, Derived):
        return copy
    sources = [apart(source) for source in copy.sources]
    known = copy.lasting and None not in sources
    return copy.replaced(cell=None, sources=tuple(sources)) if known else None


def form_of(source: Packed) -> tuple[FewBitCopy, int, str | None]:
    """The copy, number of rows and function that an int8 GEMM reads its operand from."""
    codes = source.codes()
    return codes.copy, codes.shape[:-1].numel(), codes.function


@dataclass(frozen=True)
class DerivedFunction(Derived):
    """y = f(x), or f(x) * up for two sources; `function`: f, as in `ops.functions.FUNCTIONS`."""

    function: str = ""

    def make(self) -> Tensor:
        y = FUNCTIONS[self.function].forward(self.sources[0].values())
        return y.mul_(self.sources[1].values()) if self.sources[1:] else y

    def make_codes(self) -> PackedCodes:
        if self.sources[1:] or self.narrow:
            return super().make_codes()
        x = self.sources[0].codes()  # the derivative reads the same codes
        return x.of_function(self.function) or in_codes(applied(self.function, x.values()))


@dataclass(frozen=True)
class DerivedDropout(Derived):
    """y = x mask / (1 - p). others: the mask, one bit per element."""

    p: float = 0.0

    def make(self) -> Tensor:
        (bits,), x = self.others, self.sources[0].values()
        assert bits is not None
        return dropout_backward(x, unpack_bits(bits, x.numel()).view(x.shape), self.p)


@dataclass(frozen=True)
class DerivedByExample(Derived):
    """y = x factor. others: the factor, one per example, [batch, 1, ...]."""

    def make(self) -> Tensor:
        (factor,), x = self.others, self.sources[0].values()
        assert factor is not None
        return (x.reshape(len(factor), -1) * factor.view(-1, 1)).view(self.shape)


@dataclass(frozen=True)
class DerivedCall(Derived):
    """y = call(x, *others) for any function `call` of tensors, such as rotary positions."""

    call: Callable[..., Tensor] | None = None

    def make(self) -> Tensor:
        assert self.call is not None
        return self.call(self.sources[0].values(), *self.others)


def _laid(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """x with these strides; another attention kernel may have laid its output out differently.

    In a compiled program a backward pass must not read strides: the tracer would trace it twice,
    and leave autocast disabled for the layers that follow.
    """
    if torch.compiler.is_compiling():
        order: list[int] = []  # by falling stride; `sorted` cannot compare symbols
        for dim, stride in enumerate(strides):
            order.insert(sum(1 for other in order if strides[other] >= stride), dim)
        return x.permute(order).contiguous()
    return x if x.stride() == strides else x.new_empty_strided(x.shape, strides).copy_(x)
