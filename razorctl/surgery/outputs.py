"""The output layers of a model, which stay exact: known from a trace, or guessed until it has run.

A gradient of a loss by logits has rows with one large entry, the target's, beside which an int8
copy rounds all others to zero; so the layers that make logits run in float (`layers.outputs`).
Without inputs the last linear layer in order is taken for the output layer. The first training
forward pass shows which are: in that step their GEMMs run in float, and from the next step on they
run as stock, and a layer that was taken wrongly is compressed. This is so for models that are
called themselves and not compiled. Under a joint budget on weights these stay as they are, in
float.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from razorctl.layers.base import stock_type, transforming
from razorctl.layers.linear import Linear
from razorctl.layers.outputs import MARK, Outputs, find
from razorctl.layers.registry import linear_types
from razorctl.memory.fake import mode_of
from razorctl.memory.saved import Forward, run_forward, tracing

log = logging.getLogger(__name__)


@dataclass
class Exact:
    """The linear layers that stay exact in a sparsified model.

    names: those of layers that stay stock. mend: compresses one of them, by its name. found: what
    a forward pass has shown; None until then. version: of the weights in that pass; at another one
    its graph is no longer needed, and no part of it runs again; None if that is known.
    """

    names: frozenset[str]
    mend: Mapping[str, Callable[[], None]] = field(default_factory=dict)
    found: Outputs | None = None
    version: int | None = None

    @property
    def wrong(self) -> frozenset[str]:
        """The names of the layers that are no output layers, as far as it is known."""
        known = self.found is not None and self.found.every
        return self.names - self.found.names if known and self.found else frozenset()


def traced(
    twin: nn.Module,
    inputs: Any,
    autocast: torch.dtype | None = None,
    forward: Forward | None = None,
) -> Outputs:
    """The output layers of a stock copy of a model, by what it and `forward` return."""
    results = list[Any]()
    hook = twin.register_forward_hook(lambda *call: results.append(call[-1]))
    try:
        with tracing(twin, mode_of(twin.parameters())):
            results.append(run_forward(twin, inputs, autocast, forward))
            return find(twin, results)
    finally:
        hook.remove()


def guess(model: nn.Module, known: Outputs | None) -> frozenset[str]:
    """The names of the linear layers to leave stock: those known, and the last one if it may be."""
    types = linear_types()
    linear = [name for name, m in model.named_modules() if stock_type(m) in types]
    if len(linear) < 2:  # a model must have something to compress
        return frozenset()
    if known is not None and known.every:
        return known.names
    return frozenset(linear[-1:]) | (known.names if known else frozenset())


def attach(model: nn.Module, exact: Exact) -> None:
    """Notes the layers that stay exact, until `detach`; looks at a forward pass if it has to."""
    setattr(model, MARK, exact)
    if exact.found is None or not exact.found.every:
        exact.found = None
        model.register_forward_pre_hook(_mend)
        model.register_forward_hook(_look)


def attached(module: nn.Module) -> bool:
    """Whether this very module is a model with such a note."""
    return MARK in vars(module)


def detach(module: nn.Module) -> None:
    """Removes the note of a model, if there is one."""
    if attached(module):
        _unhook(module)
        delattr(module, MARK)


def named(model: nn.Module) -> frozenset[str] | None:
    """The names of the output layers of a sparsified model; None if they are not known."""
    exact: Exact | None = vars(model).get(MARK)
    return exact.found.names if exact is not None and exact.found is not None else None


def log_found(found: Outputs) -> None:
    """Logs which layers are output layers."""
    if found.names:
        log.info("output layers, so exact: %s", ", ".join(sorted(found.names)))


def _look(model: nn.Module, inputs: Any, output: Any) -> None:
    """Finds the output layers in the graph of a first pass, whose int8 GEMMs become exact."""
    exact: Exact = vars(model)[MARK]
    if exact.found is not None or not _trains(model):
        return
    exact.found = found = find(model, output)
    exact.version = _version(model)
    missed = _missed(model, found)
    for layer in missed:
        layer.int8_weight_grad = layer.int8_input_grad = False
    if mode_of(model.parameters()) is not None:
        return
    if not (missed or exact.wrong):
        log_found(found)
        return
    log.warning(
        "output layers of %s by its first forward pass: %s; sparsify had taken %s. They run in "
        "float from this step on, and others are compressed from the next; "
        "razorctl.sparsify_within, which gets inputs, finds them before the first step.",
        stock_type(model).__name__,
        ", ".join(sorted(found.names)) or "none",
        ", ".join(sorted(exact.names)),
    )


def _mend(model: nn.Module, inputs: Any) -> None:
    """Makes output layers run as stock after the first step, and compresses others."""
    exact: Exact = vars(model)[MARK]
    if exact.found is None or not _trains(model) or exact.version == _version(model):
        return
    _unhook(model)
    for layer in _missed(model, exact.found):
        layer.exact = layer.blocks is None  # a joint budget has counted it
    for name in exact.wrong & exact.mend.keys():
        exact.mend[name]()


def _missed(model: nn.Module, found: Outputs) -> list[Linear]:
    """The output layers that were not taken for such."""
    modules = map(model.get_submodule, found.names)
    return [module for module in modules if isinstance(module, Linear)]


def _version(model: nn.Module) -> int:
    """A number that is another one after a step of an optimizer."""
    return sum(parameter._version for parameter in model.parameters())


def _trains(model: nn.Module) -> bool:
    """Whether a forward pass is one of training, and no run of it again, trace or compilation."""
    if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()):
        return False
    return torch._C._current_graph_task_id() == -1 and not transforming()


def _unhook(model: nn.Module) -> None:
    hooks: Any = model._forward_pre_hooks, model._forward_hooks
    for registered in hooks:
        for number, hook in list(registered.items()):
            if hook in (_mend, _look):
                del registered[number]
