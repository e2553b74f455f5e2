"""The output layers of a model, which stay exact: found by a trace, or guessed before a first pass.

In int8 a row of the logits' gradient rounds to zero, except for its target. Without inputs, the
guess is the last linear layer. The graph of the first training pass then shows the output layers.
They run in float in that step, and as stock from the next step on. A wrongly guessed layer is then
compressed. A compiled model keeps the guess, and so does a model of which only parts are called.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from razorctl.layers.base import in_backward, stock_type, transforming
from razorctl.layers.by_type import linear_types
from razorctl.layers.heads.outputs import MARK, Outputs, find
from razorctl.layers.kinds.linear import Linear
from razorctl.memory.fake import mode_of
from razorctl.memory.saved import Forward, run_forward, tracing
from razorctl.surgery.drawing import unhook

log = logging.getLogger(__name__)


@dataclass
class Exact:
    """The linear layers that stay exact in a sparsified model.

    names: the layers that stay stock. mend: name -> compresses that layer. found: the output layers
    seen in a forward pass; None before it. version: of the weights in that pass; None after its
    step.
    """

    names: frozenset[str]
    mend: Mapping[str, Callable[[], None]]
    found: Outputs | None
    version: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """In the first step a copy must search again, as its weights' versions restart."""
        fresh = Exact(self.names, self.mend, None)
        return vars(self if self.version is None else fresh)

    def wrong(self) -> frozenset[str]:
        """The names of stock layers that are not output layers."""
        found = self.found
        return self.names - found.names if found and found.every else frozenset()


def traced(
    twin: nn.Module, inputs: Any, autocast: torch.dtype | None, forward: Forward | None
) -> Outputs:
    """The output layers of a stock copy."""
    with tracing(twin, mode_of(twin.parameters())):
        return run_and_find(twin, inputs, autocast, forward)[1]


def run_and_find(
    twin: nn.Module, inputs: Any, autocast: torch.dtype | None, forward: Forward | None
) -> tuple[Any, Outputs]:
    """The result of a forward pass, and the output layers in the graph of it and of the model's."""
    results = list[Any]()
    hook = twin.register_forward_hook(lambda *call: results.append(call[-1]))
    try:
        result = run_forward(twin, inputs, autocast, forward)
    finally:
        hook.remove()
    return result, find(twin, [*results, result])


def guess(model: nn.Module, known: Outputs | None) -> frozenset[str]:
    """The names of the linear layers to leave stock; none if the model has only one."""
    types, found = linear_types(), known or Outputs(frozenset(), False)
    linear = [name for name, module in model.named_modules() if stock_type(module) in types]
    names = found.names if found.every else found.names.union(linear[-1:])
    return names if linear[1:] else frozenset()


def attach(model: nn.Module, exact: Exact) -> None:
    """Notes the layers that stay exact, until `detach`; the first pass finds unknown ones."""
    setattr(model, MARK, exact)
    if exact.found is not None and exact.found.every:
        _say(model, exact.found)
        return
    exact.found = None
    model.register_forward_pre_hook(_mend)
    model.register_forward_hook(_look)


def detach(module: nn.Module) -> None:
    """Removes the note of a model, if there is one."""
    vars(module).pop(MARK, None)
    unhook(module, _mend, _look)


def _look(model: nn.Module, inputs: Any, output: Any) -> None:
    """Finds the output layers in the graph of the first pass; their GEMMs then run in float."""
    exact: Exact = vars(model)[MARK]
    if exact.found is not None or not trains(model):
        return
    exact.found, exact.version = find(model, output), _version(model)
    layers = _compressed(model, exact.found)
    for layer in layers:
        layer.int8_weight_grad = layer.int8_input_grad = False
    _say(model, exact.found, exact.names if layers or exact.wrong() else frozenset())


def _mend(model: nn.Module, inputs: Any) -> None:
    """Corrects the guess after the first step, when nothing recomputes parts of that pass."""
    exact: Exact = vars(model)[MARK]
    if exact.found is not None and trains(model) and exact.version != _version(model):
        detach(model)
        setattr(model, MARK, exact)
        exact.version = None
        for layer in _compressed(model, exact.found):
            if layer.blocks is None:  # a joint budget has a number for each of its layers
                layer.rules = None  # type: ignore[assignment]
        for name in exact.wrong() & exact.mend.keys():
            exact.mend[name]()


def _compressed(model: nn.Module, found: Outputs) -> list[Linear]:
    """The output layers that are compressed."""
    return [x for x in map(model.get_submodule, found.names) if isinstance(x, Linear)]


def trains(model: nn.Module) -> bool:
    """Whether a forward pass trains, and is no recomputation, trace or compilation."""
    if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
        return False
    return not (in_backward() or transforming())


def _version(model: nn.Module) -> int:
    """A number that changes with each step of an optimizer."""
    return sum(parameter._version for parameter in model.parameters())


def _say(model: nn.Module, found: Outputs, guessed: frozenset[str] = frozenset()) -> None:
    """Logs the output layers, unless in a trace; warns if other layers were guessed."""
    if mode_of(model.parameters()) is not None:
        return
    kind, names = stock_type(model).__name__, ", ".join(sorted(found.names)) or "none"
    if not guessed:
        log.info("output layers of %s, which stay exact: %s", kind, names)
        return
    log.warning(
        "the first forward pass of %s shows its output layers: %s. They are not computed in int8; "
        "sparsify assumed %s. razorctl.sparsify_within traces inputs and finds them beforehand.",
        *(kind, names, ", ".join(sorted(guessed))),
    )
