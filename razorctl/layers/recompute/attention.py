"""Attention of any code; the code between its linear layers is recomputed in the backward pass.

A class counts as attention if its forward looks up an AttentionInterface of transformers. So does a
class named attention whose code has a softmax or fused attention. Position biases, caps, cosines
and gates are part of the code, so nothing else needs to know them.
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

# Substrings of names in the code of attention.
PRODUCTS = ("@", "softmax", "scaled_dot", "matmul", "bmm", "einsum", "attn", "attention")


class CodeLayer(RazorLayer):
    """Base of layers whose code is recomputed in the backward pass from copies."""

    feeds: ClassVar[bool] = False  # whether to offer the output as a derived activation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        code = code_of(self, args, kwargs, self.feeds)
        return self.stock(*args, **kwargs) if code is None else code.first(*args, **kwargs)


class AttentionAgain(Measured, CodeLayer):
    """Attention that stores copies of the outputs of its linear layers, as `sparse-flash` does."""

    kind: ClassVar[str] = "attention"

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        inner = (type(part) for part in module.modules() if part is not module)
        elementwise = (rule.rule if isinstance(rule, Centered) else rule).elementwise
        return elementwise and not any(map(_named, inner))


class ExpertsAgain(CodeLayer):
    """Experts with weights of three axes as parameters, recomputed from a copy of their input.

    The choice of experts is stored as it is.
    """

    kind: ClassVar[str] = "linear"

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        weights = (p for p in module._parameters.values() if p is not None)
        return rule.elementwise and not rule.prunes and any(p.dim() == 3 for p in weights)


@cache
def is_attention(kind: Any) -> bool:
    """Whether a class looks up an AttentionInterface, or is attention by its name and its code."""
    if any(type(value).__name__ == "AttentionInterface" for value in _read(kind)):
        return True
    return _named(kind) and any(
        "softmax" in name.lower() or name.startswith("scaled_dot_product") for name in _names(kind)
    )


def attends(module: nn.Module) -> bool:
    """Whether a module named attention multiplies by weights that it computes.

    A gate of channels does not, nor does a module that wraps an attention.
    """
    kind: Any = stock_type(module)  # mypy takes it for unhashable
    names = set(_names(kind)) - vars(module).keys() - module._modules.keys()
    return any(part in name.lower() for name in names for part in PRODUCTS)


def _named(kind: type[nn.Module]) -> bool:
    name = kind.__name__.lower()
    return "attention" in name or name.endswith("attn")


def _names(kind: type[nn.Module]) -> Iterator[str]:
    """The names of globals and attributes in a class's methods, and in the functions they call.

    A matrix product yields "@".
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
    """The globals that a class's forward reads, and its other methods that the forward calls."""
    names = ["forward"]
    for name in names:
        method: Any = inspect.unwrap(getattr(kind, name, None))  # type: ignore[arg-type]
        if inspect.isfunction(method) and method.__module__.partition(".")[0] != "torch":
            yield from map(method.__globals__.get, method.__code__.co_names)
            names += set(method.__code__.co_names).difference(names)
