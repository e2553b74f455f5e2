"""Layers that keep the forward pass exact and save by a rule: a file a kind, found by listing.

A layer file defines `SWAPS`, which maps exact stock types to their razor classes. A razor class
subclasses its stock class, adds no parameter or buffer, and takes over a module by assignment to
`__class__`, so parameters, state-dict keys, hooks, deepcopy and pickle stay what they were.
"""

import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from razorctl.config import registry
from razorctl.rules.quantized import Kept, Product, Rule
from razorctl.sampling.samplers import Blocks


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


class RazorLayer(nn.Module):
    """Base of the razor classes: a layer whose training forward saves by `rule`.

    kind: layer kind, as `Method.rules` names it. memo: shared by the layers of a model, None to
    keep for oneself.
    """

    kind: ClassVar[str]
    rule: Rule
    memo: Memo | None = None

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        """The number of columns that the rule of `module` will see; 1 if that may vary."""
        return 1

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        """Whether this class can stand in for a module of its stock type, with that rule."""
        return True

    @property
    def saving(self) -> bool:
        """Whether this forward pass saves for a backward pass; if not, it is the stock one."""
        return self.training and torch.is_grad_enabled()


class WeightLayer(RazorLayer):
    """A layer with a weight gradient from what `rule` keeps of its input.

    blocks: the draw of weights under a joint budget, of which this layer's weight is number
    `block`; None if every weight gets a gradient.
    """

    weight: Tensor
    blocks: Blocks | None = None
    block: int = 0

    def keep(
        self, input: Tensor, layout: Hashable, rows: Callable[[], Tensor]
    ) -> tuple[Tensor, float, Rule, Kept]:
        """Keeps `rows` of the input, if the weight is to get a gradient in this step; see `Memo`.

        Returns the weight, detached if it is not drawn, its probability, the rule that kept, and
        what that kept.
        """
        weight, p = self.weight, 1.0
        if self.blocks is not None:
            p = self.blocks.probability(self.block)
        if not (p and weight.requires_grad):
            return weight.detach(), p, self.rule, ()
        with torch.no_grad():
            memo = Memo() if self.memo is None else self.memo
            rule, kept, shared = memo.keep(input, layout, self.rule, rows)
        if self.blocks is not None:
            self.blocks.sizes[self.block] = 0 if shared else input.numel()
        return weight, p, rule, kept

    def weight_grad(
        self, rule: Rule, product: Product, kept: Kept, shape: torch.Size, p: float
    ) -> Tensor:
        """The gradient of the weight as [anything, columns]; teaches the draw of blocks."""
        if self.memo is not None and not torch.compiler.is_compiling():
            self.memo.clear()  # the same tensor in another pass is another input
        grad = rule.weight_grad(product, kept, shape)
        return grad if self.blocks is None else self.blocks.observe(self.block, p, grad)


def to_compute_dtype(x: Tensor) -> Tensor:
    """`x` in the dtype that stock autocast would compute with."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def no_autocast(device: torch.device) -> AbstractContextManager[None]:
    """For a backward pass: its dtypes are settled, even where a user runs it under autocast."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def flat(x: Tensor) -> Tensor:
    """`x` as [rows, columns]."""
    return x.reshape(-1, x.shape[-1] if x.dim() else 1)


LIBRARIES = ("timm", "transformers")  # whose files are read once their library is loaded
SWAPS: dict[type[nn.Module], type[RazorLayer]] = {
    stock: razor
    for file in registry.modules(__name__, __path__, skip=("libraries", *LIBRARIES))
    for stock, razor in file.SWAPS.items()
}
