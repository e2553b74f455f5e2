"""One copy of an activation for all layers that read it.

x -- norm -- y --+-- q    norm packs x_hat once, for its own gradient; as y = x_hat w + b, the
         +-- k    same codes with other scales are codes of y, which norm offers to the
         +-- v    linear layers that read y
h -- GELU -- a ----- fc2  GELU packs h and offers it as the h of a = GELU(h)
x -- norm -- y -- ReLU -- a -- conv     a BatchNorm offers codes of y; ReLU stores only its own
                    bits, and offers these codes as the y of a = ReLU(y)

Without an offer the first of q, k, v packs y, and the others find its copy. They share the int8
copy of y for the GEMMs of the forward pass in the same way.
"""

import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from razorctl.layers.shared_copies.int8_gradients import Handover, Int8
from razorctl.layers.shared_copies.layouts import DERIVED
from razorctl.ops.int8 import int8_rows
from razorctl.rules.base import Rules
from razorctl.rules.derived import Derived, DerivedView
from razorctl.rules.packed import Packed


def copy_of(activation: Tensor, rules: Rules) -> Packed:
    """A copy of an activation, by the rule for its width."""
    return rules.of(activation.dtype).pack(activation)


def copy_of_images(x: Tensor, rules: Rules) -> Packed:
    """A copy of the pixels of `x` [batch, channels, ...], as rows."""
    return rules.of(x.dtype).pack_images(x, x.dtype)


T = TypeVar("T")
P = TypeVar("P", bound=Packed)


class TensorCache(Generic[T]):
    """Tensor -> value, valid while the tensor is unchanged and in the same state.

    Each layer gets a value once. A layer that asks again is in another forward pass. Before it the
    tensor may have been filled anew without a new version, for example through NumPy. last: whether
    to hold only the value of the last tensor.
    """

    def __init__(self, last: bool = False) -> None:
        self._last = last
        self._entries: dict[int, tuple[weakref.ref[Tensor], Hashable, T, set[int]]] = {}

    def put(self, x: Tensor, state: Hashable, value: T, by: object = None) -> None:
        """Replaces the value of `x`; `by` is the layer that has it already."""
        if self._last:
            self.clear()
        number = id(x)

        def forget(dead: Any) -> None:
            if number in self._entries and self._entries[number][0] is dead:
                del self._entries[number]

        self._entries[number] = weakref.ref(x, forget), (x._version, state), value, {id(by)}

    def get(self, x: Tensor, state: Hashable, by: object) -> T | None:
        """The value of an unchanged `x` in this state, for the layer `by`, if there is one."""
        if id(x) in self._entries:
            tensor, before, value, layers = self._entries[id(x)]
            if tensor() is x and before == (x._version, state) and id(by) not in layers:
                layers.add(id(by))
                return value
        return None

    def clear(self) -> None:
        """Drops all values."""
        self._entries.clear()


class Memo:
    """The copies of living tensors, so that each activation is packed once.

    An activation that several layers of one kind read (q, k and v) is packed by the rule of the
    first. A norm or an activation function can offer the copy of its input as a copy of its output.
    A copy is found within one forward pass only: once per layer, while the graph that saved it
    exists, and under the same saved-tensor hooks (`_place`). A checkpointed region is recomputed
    separately, so it must share nothing with code outside. torch.compile cannot trace a weak
    reference, so in a compiled program a copy is an attribute of its tensor (`compiled_memo`).

    Attributes:
        derives: whether activations are recomputed.
        scaled: the numbers of columns of layer scales.
        measures: whether attention measures the precision that q and k need.
        told: whether a warning has named an attention that stores more.
        small_rows: whether a warning has named a norm with rows that few bits do not resolve.
        handover: int8 gradients and statistics between layers.
    """

    def __init__(
        self, derives: bool = False, scaled: Iterable[int] = (), measures: bool = False
    ) -> None:
        self.derives, self.scaled = derives, set(scaled)
        self.measures, self.told, self.small_rows = measures, False, False
        self._viewed: list[tuple[Tensor, Derived]] | None = None
        self._copies = TensorCache[Packed]()
        self._derived = TensorCache[Derived]()
        self._int8 = TensorCache[Int8](last=True)  # nothing else holds an int8 copy
        self._calls = TensorCache[Any](last=True)  # an older call would hold an input
        self.handover = Handover()

    def offer(self, x: Tensor, layout: Hashable, copy: Packed, by: object = None) -> Packed:
        """Makes `copy` the copy of `x` in that layout; `by` is the layer that has it already."""
        self._put(self._copies, x, layout, copy, by)
        return copy

    def find(self, x: Tensor, layout: Hashable, by: object) -> Packed | None:
        """The copy of `x` for the layer `by`, if there is one and x has not changed in place since.

        layout: see `layouts`.
        """
        return self._get(self._copies, x, layout, by)

    def _put(self, cache: TensorCache[P], x: Tensor, layout: Hashable, copy: P, by: object) -> None:
        if torch.compiler.is_compiling():
            from razorctl.layers.shared_copies import compiled_memo

            compiled_memo.offer(x, layout, copy)
        else:
            cache.put(x, (layout, _place()), copy, by)

    def _get(self, cache: TensorCache[P], x: Tensor, layout: Hashable, by: object) -> P | None:
        if torch.compiler.is_compiling():
            from razorctl.layers.shared_copies import compiled_memo

            return compiled_memo.find(x, layout)  # type: ignore[return-value]
        state = layout, _place()
        copy = cache.get(x, state, by)
        if copy is None and (same := _same(x)) is not None:
            copy = cache.get(same, state, by)
        return copy if copy is not None and copy.alive else None

    def derive(self, x: Tensor, copy: Derived, whole: bool = True) -> None:
        """Offers a derived `x` to the layers that read x or a view of it.

        whole: False if no layer reads x itself; a compiled program then offers it only to views.
        """
        if self._viewed is not None:
            self._viewed.append((x, copy))
        if whole or not torch.compiler.is_compiling():
            self._put(self._derived, x, DERIVED, copy, None)

    def offer_call(self, y: Tensor, call: Any) -> None:
        """Offers the linear call that computed y; not in a compiled program."""
        self._calls.put(y, _place(), call)

    def call(self, y: Tensor, by: object) -> Any:
        """Takes the offered call that computed y, for the layer `by`; None without one."""
        if torch.compiler.is_compiling():
            return None
        call = self._calls.get(y, _place(), by)
        self._calls.clear()
        return call

    def note_views(self, wanted: bool) -> None:
        """Begins or ends a part of a compiled program in which bases of views are noted.

        The compiler sets no attribute on the base of a view, so copies cannot be found there.
        """
        if self.derives and torch.compiler.is_compiling():
            self._viewed = [] if wanted else None

    def derive_view(self, x: Tensor) -> None:
        """Offers a view `x` of a noted base by itself, for layers after `note_views(False)`."""
        if self._viewed and x._base is not None:
            for copy in self.derived((x,), None):
                self._put(self._derived, x, DERIVED, copy, None)

    def derived(self, views: Sequence[Tensor], by: object) -> tuple[Derived, ...]:
        """The derived activations of `views`; empty if one of them is not derived.

        Each has the shape of its view, which may cover a part of the activation.
        """
        if not self.derives:
            return ()
        offers: list[tuple[Tensor, Derived | None]] = []  # of bases, by identity
        derived: list[Derived] = []
        for x in views:
            base, copy = x, self._get(self._derived, x, DERIVED, by)
            if copy is None and x._base is not None:
                base = x._base
                copies = [offer for other, offer in offers if other is base]
                if not copies:  # a layer finds the copy of a tensor once
                    copies = [self._of_base(base, by)]
                    offers.append((base, copies[0]))
                (copy,) = copies
            if copy is None:
                return ()
            if base is not x:
                copy = DerivedView(
                    x.shape,
                    x.dtype,
                    (copy,),
                    strides=x.stride(),
                    offset=_offset(x) - _offset(base),
                    whole=base.stride(),
                )
            derived.append(copy)
        return tuple(derived)

    def both(self, x: Tensor, f: Tensor, by: object) -> tuple[Derived, ...]:
        """The derived activations of x and f; empty if one of them is not derived."""
        parts = self.derived((x,), by), self.derived((f,), by)
        return (*parts[0], *parts[1]) if all(parts) else ()

    def _of_base(self, base: Tensor, by: object) -> Derived | None:
        """The derived activation of the base of a view, else None."""
        if not torch.compiler.is_compiling():
            return self._get(self._derived, base, DERIVED, by)
        for tensor, copy in self._viewed or ():
            if tensor is base:
                return copy
        return None

    def int8(self, x: Tensor, rows: Tensor, by: object) -> Int8:
        """The int8 copy of `rows`: x as [rows, columns], in the dtype that a layer computes in.

        Checkpointed regions may share it, because autograd does not save it.
        """
        if torch.compiler.is_compiling():  # the compiler computes equal copies once
            return Int8(*int8_rows(rows))
        int8 = self._int8.get(x, rows.dtype, by)
        if int8 is None:
            int8 = Int8(*int8_rows(rows))
            self._int8.put(x, rows.dtype, int8, by)
        return int8

    def clear(self) -> None:
        """Drops everything. The backward pass calls it, so the next forward pass packs again."""
        if not torch.compiler.is_compiling():
            for cache in (self._copies, self._derived, self._int8, self._calls):
                cache.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles start empty.
        return Memo, (self.derives, tuple(self.scaled), self.measures)


def _same(x: Tensor) -> Tensor | None:
    """The tensor that `x` views unchanged, as in a module under FSDP2; else None."""
    base = x._base
    if base is None or (base.shape, base.dtype, base.stride()) != (x.shape, x.dtype, x.stride()):
        return None
    return base if base.storage_offset() == x.storage_offset() else None


def _offset(x: Tensor) -> int:
    """Where `x` begins in its storage, in elements."""
    if torch.compiler.is_compiling():
        from razorctl.layers.shared_copies import compiled_memo

        return compiled_memo.offset(x)
    return int(x.storage_offset())


def _place() -> Hashable:
    """The saved-tensor hooks and backward pass that are active now, as a comparable value.

    Activation checkpointing stores each region under its own hooks, and recomputes it under others
    in the backward pass. Reentrant checkpointing stores it only in the backward pass. Hooks are
    weakly referenced: a region's hooks refer to the graph before it.
    """
    task = torch._C._current_graph_task_id()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return task
    try:
        return task, weakref.ref(hooks[0])
    except TypeError:  # a method of a C type; it refers to no graph
        return task, hooks[0]
