"""The razor class of a module: by its type, or else by what the module computes.

The forward of an unlisted type runs on a small example as in training. The result is compared with
the formulas of norms, activation functions and gated MLPs. Attention is recognized by its code
(`recompute.attention`). Any other forward may call functions that have razor layers
(`called_functions`); if not, the module stays stock.
"""

import copy
import inspect
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from razorctl.layers.base import PARAMETRIZED, RazorLayer, stock_type
from razorctl.layers.by_type import razor_of_module
from razorctl.layers.kinds.activation import by_values
from razorctl.layers.own_forward import place
from razorctl.layers.recognition import called_functions, gated_mlps_by_value, norms_by_value
from razorctl.layers.recompute.attention import AttentionAgain, is_attention

# Attributes that a razor class may share with a module: the ones that it reads, and its forward.
SHARED = ("forward", "weight", "bias", "normalized_shape", "eps", "p", "inplace")


@_disable_current_modes()  # under a fake mode there are no values to compare
def razor_for(module: nn.Module, again: bool = True) -> type[RazorLayer] | None:
    """The razor class of a module; None if it stays stock.

    again: whether attention of any code may be recomputed in the backward pass.
    """
    kind: Any = stock_type(module)  # mypy takes it for unhashable
    razor = razor_of_module(module)
    if razor is not None or _of_torch(kind) or not place(module):
        return razor
    if again and is_attention(kind):
        return AttentionAgain
    razor = _by_values(module, kind) if _takes_one(kind, bool(module._modules)) else None
    razor = called_functions.recognized(kind) if razor is None else razor
    return None if razor is None or _clash(razor, module, kind) else razor


def _of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _by_values(module: nn.Module, kind: type[nn.Module]) -> type[RazorLayer] | None:
    """The razor class of a module that computes the same as a known layer on an example."""
    if PARAMETRIZED in module._modules or isinstance(module, RazorLayer):
        return None
    of: Any = module
    recognizes: Any = gated_mlps_by_value.by_values if module._modules else norms_by_value.by_values
    if not (module._modules or "norm" in kind.__name__.lower()):
        if module._parameters or module._buffers:
            return None
        twin = copy.copy(module)
        twin.training = True
        of, recognizes = partial(kind.forward, twin), by_values
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.random.fork_rng([]):
        before = torch.get_rng_state()
        razor: type[RazorLayer] | None = recognizes(of)
        draws = not torch.equal(torch.get_rng_state(), before)  # then the values are random
    return None if draws else razor


@cache
def _takes_one(kind: type[nn.Module], unnamed: bool) -> bool:
    """Whether a forward takes one argument; unnamed: it may also take *args and **kwargs."""
    try:
        parameters = inspect.signature(kind.forward).parameters.values()
    except ValueError:
        return False
    others = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD) if unnamed else ()
    named = [p for p in parameters if p.kind not in others]
    return len(named) == 2 and all(
        p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in named
    )


def _clash(razor: type[RazorLayer], module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether an attribute of the module would shadow one of its razor class."""
    ours = {n for c in razor.__mro__ if issubclass(c, RazorLayer) for n in _names(vars(c))}
    own: Any = (vars(c) for c in kind.__mro__ if issubclass(c, nn.Module) and c is not nn.Module)
    theirs = {name for attributes in own for name in _names(attributes)}
    theirs |= vars(module).keys() | module._modules.keys()
    return not ours.isdisjoint(theirs.difference(SHARED))


def _names(attributes: Any) -> set[str]:
    return {name for name in attributes if not name.startswith("__")}
