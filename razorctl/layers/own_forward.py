"""The forward of an instance, which runs in place of its class's forward.

accelerate's hooks put a wrapper there, which calls the bound method that it keeps in another place.
"""

from itertools import chain
from types import MethodType
from typing import Any

from torch import nn

PLACES = ("_old_forward", "forward")  # what a hook of accelerate wraps runs inside it


class InPlace:
    """Base of callables that replace a forward: `inner`, or else the class's forward."""

    inner: Any = None


def place(module: nn.Module) -> str | None:
    """The attribute whose call runs the forward of the class; None if code of its own does not."""
    own = vars(module)
    ours = (name for name in PLACES if isinstance(own.get(name), InPlace))
    bound = (name for name in PLACES if _bound(module, name, type(module)))
    return next(chain(ours, bound), None) if "forward" in own else "forward"


def put(module: nn.Module, forward: InPlace) -> None:
    """Makes `forward` run where that of the class does, until `take`."""
    vars(module)[place(module) or "forward"] = forward


def runs(module: nn.Module, kind: type[InPlace] = InPlace) -> bool:
    """Whether some kind of forward runs in place of that of this very module."""
    return any(isinstance(vars(module).get(name), kind) for name in PLACES)


def take(module: nn.Module) -> None:
    """Puts back what was there before."""
    for name in PLACES:
        while isinstance(forward := vars(module).get(name), InPlace):
            del vars(module)[name]
            if forward.inner is not None or name != "forward":
                vars(module)[name] = forward.inner or MethodType(type(module).forward, module)


def rebind(module: nn.Module, before: type[nn.Module]) -> None:
    """Binds the forward of a module's class where that of its class before was bound."""
    for name in PLACES:
        if _bound(module, name, before):
            vars(module)[name] = MethodType(type(module).forward, module)


def _bound(module: nn.Module, name: str, kind: type[nn.Module]) -> bool:
    return vars(module).get(name) == MethodType(kind.forward, module)
