"""Code between layers that is recomputed in the backward pass.

Attention, for example, is linear layers and the code between them:

x -- q, k, v ... code ... a -- o -- y

Forward: y = f(x), the stock one. Autograd stores nothing of the code. Backward: the code is
recomputed from copies of q, k and v, and of x if it reads x. The saved tensors of its operations
are taken from that second run, as in torch's checkpoint. So the gradient is the gradient of f at
the values of the copies. The layers inside store by their own rules, and are not recomputed. The
input a of the layer o is recomputed.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy as shallow
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from razorctl.layers.autocast import compute_dtype, no_autocast
from razorctl.layers.base import RazorLayer, WeightLayer, flat, name_of, saved, stock_type
from razorctl.layers.recompute.kept_inputs import RESULT, Code, CodeInputs, CodeOutput, KeptByCode
from razorctl.layers.recompute.large_logits import Measured, drawn, error, unhooked
from razorctl.layers.recompute.replayed_state import (
    Context,
    Rows,
    by_position,
    unknown,
    without_cache,
)
from razorctl.layers.recompute.runs import FirstRun, SecondRun, calling, first_of
from razorctl.layers.shared_copies import layouts
from razorctl.ops.images import pixels
from razorctl.rules.derived import Cell, apart
from razorctl.rules.packed import Packed, PackedValues


class CodeAgain(Code):
    """Code that runs in the forward pass, and again in the backward pass."""

    def first(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the code; raises UsageError if it changes an argument in place."""
        run = FirstRun(self, {**dict(enumerate(args)), **kwargs})
        if not any(t.requires_grad for t in (*run.tensors, *self.owner.parameters())):
            return self.call(*args, **kwargs)
        if not self.parts:  # no part offers a copy, and the code may change arguments
            run.form()
        self.context = Context(self.owner, self.name, self.parts, run.tensors)
        with calling(self.parts, run.through), run.hooks():
            result = self.call(*args, **kwargs)
        if run.measures and self.likes:
            self.measure(run, first_of(result))
        self.context.end()
        run.end()
        if self.feeds and self.likes:
            run.offer(first_of(result), RESULT)
        return result

    def unpack(self, kept: KeptByCode) -> Tensor:
        if kept.number not in self.kept:
            self.again(self.trial or saved(self.keeper.grad_fn)[0])
        if kept.number not in self.kept:
            raise self.differs()
        return self.kept.pop(kept.number)

    def output(self, number: int, inputs: CodeInputs) -> Tensor:
        """The input of call `number` of a part in the second run, or the RESULT."""
        if number not in self.read:
            self.again(inputs)
        if number not in self.read:
            raise self.differs()
        return self.read.pop(number)

    def again(self, inputs: CodeInputs) -> None:
        """Recomputes the code as far as the inputs reach; fills `kept` and `read`."""
        run = SecondRun(self, inputs)
        state = dict(vars(self.owner))
        with (
            self.context.again(),
            calling(self.parts, run.replayed),
            torch.autograd.graph.saved_tensors_hooks(run.pack, _never),
        ):
            run.run()
        vars(self.owner).update(state)  # attributes that the code sets stay as in the first run


class LayerCode(CodeAgain):
    """The code of a razor layer, with copies packed by the layer's rules."""

    by_rules = True
    owner: RazorLayer

    def derive(self, views: Sequence[Tensor]) -> Sequence[Packed]:
        linear = self.owner.kind == "linear"  # its copies are rows
        return () if linear or not views else self.owner.derived(*views)

    def copy(self, x: Tensor, rows: Rows) -> Packed:
        owner, dtype = self.owner, compute_dtype(x)
        if rows.images:
            return owner.rules.of(x.dtype).pack_images(x.detach(), x.dtype)
        if owner.kind == "linear":
            return owner.shared(x, x, layouts.of_rows(dtype))[0]
        if derived := owner.derived(x):
            return derived[0]
        if owner.memo is not None:
            copy = owner.memo.find(x, layouts.of_rows(dtype), owner)
            if copy is not None and copy.elementwise:
                return copy
        return owner.rules.of(dtype).pack(flat(x.detach()))

    def measure(self, run: FirstRun, end: Tensor) -> None:
        """Measures the error of gradients of parts' outputs, or of arguments, for a random dend."""
        owner, inputs, context = self.owner, run.form(), self.context
        assert isinstance(owner, Measured)
        given = {id(x) for x, *_ in run.leaves} if self.outputs else set()
        tensors = {i: x for i, (x, _) in run.made.items() if x.requires_grad and id(x) not in given}
        tensors = {i: x for i, x in tensors.items() if i not in run.measured}
        if not (tensors and end.requires_grad):
            return
        rows = [pixels(x) if rows.images else x for x, rows in run.made.values()]
        whole = [PackedValues(x.shape, x.dtype, x.detach()) for x in rows]

        def gradients(sources: Sequence[Packed]) -> dict[int, Tensor]:
            self.trial = inputs.replaced(sources=tuple(sources), cell=Cell())
            dout = drawn(end.shape, end)
            with no_autocast(end.device), unhooked():
                found = torch.autograd.grad(
                    end, [*tensors.values()], dout, retain_graph=True, allow_unused=True
                )
            return {i: t for i, t in zip(tensors, found, strict=True) if t is not None}

        self.context = shallow(context)
        self.context.end()
        want = gradients(whole)

        def copies() -> list[Packed]:
            closer = want if owner.logit_bits else {}
            return [self.copy(*run.made[i]) if i in closer else x for i, x in enumerate(run.copies)]

        def errors() -> tuple[float, float]:
            rough = [apart(copy) or x for copy, x in zip(copies(), whole, strict=True)]
            values = {i: self.packed[i].read(rough[i]) for i in want}
            return error(gradients(rough), want), error(values, {i: tensors[i] for i in want})

        owner.settle(errors, end.dtype)
        self.trial, self.context, self.kept = None, context, {}
        run.measured |= want.keys()
        if owner.logit_bits:
            run.copies = copies()
            run.inputs, run.measures, run.made = None, False, {}

    def offer(self, x: Tensor, inputs: Callable[[], CodeInputs], number: int) -> None:
        memo = self.owner.memo
        if memo is not None and memo.derives:
            form = CodeOutput(x.shape, x.dtype, (inputs(),), code=self, number=number)
            memo.derive(x, form, whole=number != RESULT)


@cache
def _names(forward: Any) -> tuple[str, ...]:
    return by_position(forward)[1:]


def code_of(
    layer: RazorLayer, args: Sequence[Any], kwargs: Mapping[str, Any], feeds: bool = False
) -> CodeAgain | None:
    """The code of a layer's stock forward; None if it must run unchanged.

    It must in a compiled program, and if an argument may hold tensors out of sight.
    """
    if torch.compiler.is_compiling() or not layer.saving:
        return None
    values = [without_cache(layer, value) for value in (*args, *kwargs.values())]
    leaves = tree_leaves(values)
    tensors = any(isinstance(leaf, Tensor) for leaf in leaves)
    if not tensors or unknown(leaves):
        return None
    parts = [part for part in layer.modules() if isinstance(part, WeightLayer)]
    names = _names(stock_type(layer).forward)
    return LayerCode(layer, name_of(layer), layer.stock, parts, names, feeds)


def _never(number: int) -> Tensor:
    raise AssertionError("the graph of a recomputation is not used")
