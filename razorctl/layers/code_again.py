"""Code between layers, which runs again in the backward pass.

Attention, say, is linear layers and the code between them:

x -- q, k, v ... code ... a -- o -- y

Forward: y = f(x), the stock one. Autograd keeps nothing of the code. Backward: the code runs again
with copies of q, k and v in place of the layers that made them, and of x where it reads x; what its
operations need is taken from that run, as in torch's checkpoint. So the gradient is that of f with
the values of the copies. The layers inside keep by rules of their own, and do not run again; a is
made again for the layer that it feeds.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from razorctl.layers.base import RazorLayer, WeightLayer, saved, stock_type
from razorctl.layers.code_forms import RESULT, Code, CodeInputs, Context
from razorctl.layers.code_runs import FirstRun, KeptByCode, SecondRun, calling, first_of
from razorctl.layers.fused_attention import replaying
from razorctl.layers.second_run import (
    names_of,
    unchanged,
    unknown,
    watching_buffers,
    without_cache,
)


class CodeAgain(Code):
    """Code that runs twice."""

    def first(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the code; raises UsageError if it changes an argument in place."""
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        run = FirstRun(self, arguments, self.unpack)
        changed = watching_buffers(self.owner)
        self.context = Context.now(run.device)
        with calling(self.parts, run.through), run.hooks():
            result = self.call(*args, **kwargs)
        self.buffers = changed()
        run.end()
        if self.feeds and self.likes:
            run.offer(first_of(result), RESULT)
        return result

    def unpack(self, kept: KeptByCode) -> Tensor:
        """A tensor that the code keeps, of the second run."""
        if kept.number not in self.kept:
            (inputs,) = saved(self.keeper)
            self.again(inputs)
        if kept.number not in self.kept:
            raise self.differs()
        return self.kept.pop(kept.number)

    def output(self, number: int, inputs: CodeInputs) -> Tensor:
        """The tensor that the call of a part got in the second run."""
        if number not in self.read:
            self.again(inputs)
        if number not in self.read:
            raise self.differs()
        return self.read.pop(number)

    def again(self, inputs: CodeInputs) -> None:
        """Runs the code again, as far as the inputs reach; fills `kept` and `read`."""
        run = SecondRun(self, inputs)
        state = dict(vars(self.owner))
        with ExitStack() as stack:
            for each in (
                replaying(self.context.random, run.device),
                torch.enable_grad(),
                self.context.autocast(run.device),
                unchanged(self.buffers),
                calling(self.parts, run.replayed),
                torch.autograd.graph.saved_tensors_hooks(run.pack, _never),
            ):
                stack.enter_context(each)
            run.run()
        vars(self.owner).update(state)  # what the code leaves there is of the first run


def code_of(layer: RazorLayer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CodeAgain | None:
    """The code of a layer's stock forward; None if it runs in full.

    It does in a compiled program, and where an argument may hold tensors unseen.
    """
    if torch.compiler.is_compiling() or not layer.saving:
        return None
    values = [without_cache(layer, value) for value in (*args, *kwargs.values())]
    leaves = tree_leaves(values)
    tensors = any(isinstance(leaf, Tensor) for leaf in leaves)
    if not tensors or unknown(leaves):
        return None
    parts = [part for part in layer.modules() if isinstance(part, WeightLayer)]
    kind: Any = stock_type(layer)
    return CodeAgain(layer, layer.stock, parts, names_of(kind))


def _never(number: int) -> Tensor:
    raise AssertionError("the graph of a second run is not used")
