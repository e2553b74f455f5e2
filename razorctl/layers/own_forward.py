"""Forwards that are attributes of instances, and override the forward of the class.

accelerate sets such a wrapper. It calls the bound forward, which it stores in `_old_forward`.
"""

from itertools import chain
from types import MethodType
from typing import Any

from torch import nn

PLACES = ("_old_forward", "forward")  # inside accelerate's wrapper, and without one


class InPlace:
    """Base of callables that replace a forward. inner: the forward, None for the class's."""

    inner: Any = None


def place(module: nn.Module) -> str | None:
    """The attribute for the forward of the class; None if foreign code overrides it."""
    own = vars(module)
    ours = (name for name in PLACES if isinstance(own.get(name), InPlace))
    bound = (name for name in PLACES if _bound(module, name, type(module)))
    return next(chain(ours, bound), None) if "forward" in own else "forward"


def put(module: nn.Module, forward: InPlace) -> None:
    """Runs `forward` in place of the forward of the class, until `take`."""
    vars(module)[place(module) or "forward"] = forward


def runs(module: nn.Module, kind: type[InPlace] = InPlace) -> bool:
    """Whether a `kind` overrides the forward of this module, not of a submodule."""
    return any(isinstance(vars(module).get(name), kind) for name in PLACES)


def take(module: nn.Module) -> None:
    """Restores the forwards that `put` replaced."""
    for name in PLACES:
        while isinstance(forward := vars(module).get(name), InPlace):
            del vars(module)[name]
            if forward.inner is not None or name != "forward":
                vars(module)[name] = forward.inner or MethodType(type(module).forward, module)


def rebind(module: nn.Module, before: type[nn.Module]) -> None:
    """Binds the forward of the new class wherever the forward of the class `before` was bound."""
    for name in PLACES:
        if _bound(module, name, before):
            vars(module)[name] = MethodType(type(module).forward, module)


def _bound(module: nn.Module, name: str, kind: type[nn.Module]) -> bool:
    return vars(module).get(name) == MethodType(kind.forward, module)
