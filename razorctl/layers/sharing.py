"""One copy of an activation for all layers that it feeds.

x -- norm -- y --+-- q    norm packs x_hat once, for its own gradient; as y = x_hat w + b, the
                 +-- k    same codes with other scales are codes of y, which norm offers to the
                 +-- v    linear layers that y feeds
h -- GELU -- a ----- fc2  GELU packs h and offers it as the h of a = GELU(h)
without an offer the first of q, k, v packs y, and the others find its copy
"""

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from razorctl.rules.base import Rule, Rules
from razorctl.rules.packed import Packed


class Copy(NamedTuple):
    """What was packed of an activation, and the rule that did."""

    rule: Rule
    packed: Packed


class Memo:
    """The last copy, and of which tensor, so that an activation is packed once.

    One that feeds several layers of one kind (separate q, k and v) is packed by the rule of the
    first. What a norm or an activation function packs of its input may tell its output as well:
    then it offers that to the layer which the output feeds. What is saved elsewhere is another
    matter (`_place`): a checkpointed region runs again by itself, so it must share with nothing
    outside. torch.compile traces through no weak reference; there a copy is an attribute of its
    tensor instead (`traced`).
    """

    def __init__(self) -> None:
        self._entry: tuple[weakref.ref[Tensor], Hashable, Copy] | None = None

    def pack(
        self, x: Tensor, layout: Hashable, rules: Rules, rows: Callable[[], Tensor]
    ) -> tuple[Copy, bool]:
        """The copy of `x`, and whether it was here already.

        `x` is the activation as the layer received it; a change in place makes it another. `rows`
        makes of it, detached, what a rule is to see; `layout` is the same where `rows` is.
        """
        copy = self._find(x, layout)
        if copy is not None:
            return copy, True
        activation = rows()
        rule = rules.of(activation)
        copy = Copy(rule, rule.pack(activation))
        self.offer(x, layout, copy)
        return copy, False

    def offer(self, x: Tensor, layout: Hashable, copy: Copy) -> None:
        """Says that `copy` is what there is to save of `x` in that layout."""
        if torch.compiler.is_compiling():
            from razorctl.layers import traced

            traced.offer(x, layout, copy)
        else:
            state = layout, x._version, _place()
            self._entry = weakref.ref(x, self._forget), state, copy

    def _find(self, x: Tensor, layout: Hashable) -> Copy | None:
        if torch.compiler.is_compiling():
            from razorctl.layers import traced

            return traced.find(x, layout)
        if self._entry is not None:
            known, state, copy = self._entry
            if known() is x and state == (layout, x._version, _place()):
                return copy
        return None

    def _forget(self, dead: Any) -> None:
        if self._entry is not None and self._entry[0] is dead:
            self._entry = None

    def clear(self) -> None:
        """Forgets; a backward pass ends what was packed before it."""
        if not torch.compiler.is_compiling():
            self._entry = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Memo, ()  # copies and pickles start empty


def _place() -> Hashable:
    """Where autograd saves at the moment; equal only to itself, and while that is so.

    Activation checkpointing saves each region by hooks of its own, and again by others in the
    backward pass, or, if reentrant, then for the first time. Hooks are held weakly: those of a
    region lead to the graph before it.
    """
    task = torch._C._current_graph_task_id()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return task
    try:
        return task, weakref.ref(hooks[0])
    except TypeError:  # a method of a C type, which holds nothing
        return task, hooks[0]
