"""Attention of any code, which runs again in the backward pass between its linear layers.

A class is known to be attention by an AttentionInterface of transformers that its forward asks, or
by its name and a softmax or fused attention in its code. No file but this one need know it:
position biases, caps, cosines and gates are part of the code.
"""

import dis
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar

from torch import nn

from razorctl.layers.base import RazorLayer, stock_type
from razorctl.layers.recompute.code import code_of
from razorctl.layers.recompute.large_logits import Measured
from razorctl.rules.base import Rule
from razorctl.rules.prune import Centered

# Parts of names in the code of attention.
PRODUCTS = ("@", "softmax", "scaled_dot", "matmul", "bmm", "einsum", "attn", "attention")


class CodeLayer(RazorLayer):
    """Base of layers whose code runs again in the backward pass, from copies."""

    feeds: ClassVar[bool] = False  # whether their output is made again for other layers

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        code = code_of(self, args, kwargs, self.feeds)
        return self.stock(*args, **kwargs) if code is None else code.first(*args, **kwargs)


class AttentionAgain(Measured, CodeLayer):
    """Attention that keeps copies of what its linear layers return, as `sparse-flash` does."""

    kind: ClassVar[str] = "attention"

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        inner = (type(part) for part in module.modules() if part is not module)
        elementwise = (rule.rule if isinstance(rule, Centered) else rule).elementwise
        return elementwise and not any(map(_named, inner))


class ExpertsAgain(CodeLayer):
    """Experts whose weights are parameters of three axes, and run again from a copy of their input.

    The choice of experts is kept as it is.
    """

    kind: ClassVar[str] = "linear"

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        weights = (p for p in module._parameters.values() if p is not None)
        return rule.elementwise and not rule.prunes and any(p.dim() == 3 for p in weights)


@cache
def is_attention(kind: Any) -> bool:
    """Whether a class asks an AttentionInterface, or is attention by its name and its code."""
    if any(type(value).__name__ == "AttentionInterface" for value in _read(kind)):
        return True
    return _named(kind) and any(
        "softmax" in name.lower() or name.startswith("scaled_dot_product") for name in _names(kind)
    )


def attends(module: nn.Module) -> bool:
    """Whether a module named attention multiplies by weights that it computes.

    A gate of channels does not, nor does a wrapper of a part.
    """
    kind: Any = stock_type(module)  # which mypy takes for unhashable
    names = set(_names(kind)) - vars(module).keys() - module._modules.keys()
    return any(part in name.lower() for name in names for part in PRODUCTS)


def _named(kind: type[nn.Module]) -> bool:
    name = kind.__name__.lower()
    return "attention" in name or name.endswith("attn")


def _names(kind: type[nn.Module]) -> Iterator[str]:
    """The names of globals and attributes in the methods of a class, and in functions they call.

    A product of matrices is named @.
    """
    for base in kind.__mro__:
        if base is nn.Module:
            return
        for method in map(inspect.unwrap, filter(inspect.isfunction, vars(base).values())):
            yield from (s.argrepr for s in dis.get_instructions(method) if s.argrepr == "@")
            for name in method.__code__.co_names:
                yield name
                called = method.__globals__.get(name)
                if inspect.isfunction(called):
                    yield from inspect.unwrap(called).__code__.co_names


def _read(kind: type[nn.Module]) -> Iterator[Any]:
    """The globals that the forward of a class reads, and methods of the class that it calls."""
    names = ["forward"]
    for name in names:
        method: Any = inspect.unwrap(getattr(kind, name, None))  # type: ignore[arg-type]
        if inspect.isfunction(method) and method.__module__.partition(".")[0] != "torch":
            yield from map(method.__globals__.get, method.__code__.co_names)
            names += set(method.__code__.co_names).difference(names)
