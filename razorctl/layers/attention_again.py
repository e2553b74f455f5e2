"""Attention of any code, which runs again in the backward pass between its linear layers.

A class is known to be attention by its name, and by a softmax or fused attention in its code. No
file but this one need know it: position biases, caps, cosines and gates are part of the code.
"""

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar

from torch import nn

from razorctl.layers.base import RazorLayer
from razorctl.layers.code_again import code_of
from razorctl.layers.large_logits import Measured
from razorctl.rules.base import Rule
from razorctl.rules.prune import Centered


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
    """Whether a class calls itself attention, and its code has a softmax or fused attention."""
    return _named(kind) and any(
        "softmax" in name.lower() or name.startswith("scaled_dot_product") for name in _names(kind)
    )


def _named(kind: type[nn.Module]) -> bool:
    name = kind.__name__.lower()
    return "attention" in name or name.endswith("attn")


def _names(kind: type[nn.Module]) -> Iterator[str]:
    """The names of globals and attributes in the methods of a class, and in functions they call."""
    for base in kind.__mro__:
        if base is nn.Module:
            return
        for method in map(inspect.unwrap, filter(inspect.isfunction, vars(base).values())):
            for name in method.__code__.co_names:
                yield name
                called = method.__globals__.get(name)
                if inspect.isfunction(called):
                    yield from inspect.unwrap(called).__code__.co_names
