"""Classes that are known by the code of their forward.

transformers copies code between models: `LlamaRMSNorm.forward` and `Qwen2RMSNorm.forward` are the
same instructions. What is known of one such class holds for all.
"""

import inspect
from collections.abc import Hashable
from types import CodeType
from typing import Any

from torch import nn


def same_forward(stock: type[nn.Module], reference: type[nn.Module]) -> bool:
    """Whether the forward of `stock` is that of `reference`, and what it calls of its class too."""
    helpers = [n for n in forward_names(reference) if n.startswith("_") and n in vars(reference)]
    return all(
        _instructions(_code(stock, name)) == _instructions(_code(reference, name))
        for name in ("forward", *helpers)
    )


def forward_names(stock: type[nn.Module]) -> frozenset[str]:
    """The names of globals and attributes in the forward of a class."""
    code = _code(stock, "forward")
    return frozenset() if code is None else frozenset(code.co_names)


def texts_near(stock: type[nn.Module], name: str) -> frozenset[str]:
    """The texts in those functions of a class that name `name`, also those in tuples."""
    functions = [f for f in map(inspect.unwrap, vars(stock).values()) if inspect.isfunction(f)]
    found = [f.__code__.co_consts for f in functions if name in f.__code__.co_names]
    parts = [part for each in found for c in each for part in (c if isinstance(c, tuple) else [c])]
    return frozenset(part for part in parts if isinstance(part, str))


def _code(stock: type[nn.Module], name: str) -> CodeType | None:
    function: Any = getattr(stock, name, None)
    return getattr(inspect.unwrap(function), "__code__", None)


def _instructions(code: CodeType | None) -> Hashable:
    """What a function does, without the names of its variables and its docstring."""
    if code is None:
        return None
    constants = [c for c in code.co_consts if not isinstance(c, (str, CodeType))]
    inner = [_instructions(c) for c in code.co_consts if isinstance(c, CodeType)]
    return code.co_code, code.co_names, tuple(map(repr, constants)), tuple(inner)
