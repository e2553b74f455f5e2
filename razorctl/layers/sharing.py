"""One copy of an activation for all layers that it feeds.

x -- norm -- y --+-- q    norm packs x_hat once, for its own gradient; as y = x_hat w + b, the
                 +-- k    same codes with other scales are codes of y, which norm offers to the
                 +-- v    linear layers that y feeds
h -- GELU -- a ----- fc2  GELU packs h and offers it as the h of a = GELU(h)
without an offer the first of q, k, v packs y, and the others find its copy
"""

import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from razorctl.rules.base import Kept, Rule


class Memo:
    """What was last kept, and of which tensor, so that an activation is kept once.

    One that feeds several layers of one kind (separate q, k and v) is kept by the rule of the
    first. What a norm or an activation function keeps of its input may tell its output as well:
    then it offers that to the layer which the output feeds. What is saved elsewhere is another
    matter (`_place`): a checkpointed region runs again by itself, so it must share with nothing
    outside. Under torch.compile every layer keeps for itself: identity means nothing to a traced
    program.
    """

    def __init__(self) -> None:
        self._entry: tuple[weakref.ref[Tensor], Hashable, Rule, Kept] | None = None

    def keep(
        self, x: Tensor, layout: Hashable, rule: Rule, rows: Callable[[], Tensor]
    ) -> tuple[Rule, Kept, bool]:
        """What is kept of `x`, the rule that kept it, and whether that was here already.

        `x` is the activation as the layer received it; a change in place makes it another. `rows`
        makes of it, detached, what the rule is to see; `layout` is the same where `rows` is.
        """
        if torch.compiler.is_compiling():
            return rule, rule.keep(rows()), False
        state = layout, x._version, _place()
        if self._entry is not None:
            known, known_state, first, kept = self._entry
            if known() is x and known_state == state:
                return first, kept, True
        kept = rule.keep(rows())
        self.offer(x, layout, rule, kept)
        return rule, kept, False

    def offer(self, x: Tensor, layout: Hashable, rule: Rule, kept: Kept) -> None:
        """Says that `kept`, by `rule`, is what there is to keep of `x` in that layout."""
        if not torch.compiler.is_compiling():
            state = layout, x._version, _place()
            self._entry = weakref.ref(x, self._forget), state, rule, kept

    def _forget(self, dead: Any) -> None:
        if self._entry is not None and self._entry[0] is dead:
            self._entry = None

    def clear(self) -> None:
        """Forgets; a backward pass ends what was kept before it."""
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
