"""Forwards of instances, which override the forward of the class.

accelerate puts a wrapper there, which calls the bound forward that it keeps in `_old_forward`.
"""

from itertools import chain
from types import MethodType
from typing import Any

from torch import nn

PLACES = ("_old_forward", "forward")  # what a hook of accelerate wraps runs inside it


class InPlace:
    """Base of callables that replace a forward: `inner`, or the class's forward if it is None."""

    inner: Any = None


def place(module: nn.Module) -> str | None:
    """The attribute that holds the forward of the class; None if foreign code overrides it."""
    own = vars(module)
    ours = (name for name in PLACES if isinstance(own.get(name), InPlace))
    bound = (name for name in PLACES if _bound(module, name, type(module)))
    return next(chain(ours, bound), None) if "forward" in own else "forward"


def put(module: nn.Module, forward: InPlace) -> None:
    """Runs `forward` in place of the forward of the class, until `take`."""
    vars(module)[place(module) or "forward"] = forward


def runs(module: nn.Module, kind: type[InPlace] = InPlace) -> bool:
    """Whether a `kind` overrides the forward of this module itself, not of a part."""
    return any(isinstance(vars(module).get(name), kind) for name in PLACES)


def take(module: nn.Module) -> None:
    """Restores the forwards that `put` replaced."""
    for name in PLACES:
        while isinstance(forward := vars(module).get(name), InPlace):
            del vars(module)[name]
            if forward.inner is not None or name != "forward":
                vars(module)[name] = forward.inner or MethodType(type(module).forward, module)


def rebind(module: nn.Module, before: type[nn.Module]) -> None:
    """Binds the forward of a module's class where the forward of its former class was bound."""
    for name in PLACES:
        if _bound(module, name, before):
            vars(module)[name] = MethodType(type(module).forward, module)


def _bound(module: nn.Module, name: str, kind: type[nn.Module]) -> bool:
    return vars(module).get(name) == MethodType(kind.forward, module)
