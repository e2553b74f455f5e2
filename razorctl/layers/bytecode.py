"""Stock classes compared by the bytecode of their forward.

transformers copies code between models: `LlamaRMSNorm.forward` and `Qwen2RMSNorm.forward` are the
same instructions. A razor class for one such class serves all of them.
"""

import inspect
from collections.abc import Hashable
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn

CHECKPOINTING = "forward_with_checkpointing"


def same_forward(stock: type[nn.Module], reference: type[nn.Module]) -> bool:
    """Whether two classes have the same forward, and the same private methods that it calls."""
    helpers = [
        name
        for name in forward_names(reference)
        if name.startswith("_") and name in vars(reference)
    ]
    return all(
        _instructions(_code(stock, name)) == _instructions(_code(reference, name))
        for name in ("forward", *helpers)
    )


def forward_names(stock: type[nn.Module]) -> frozenset[str]:
    """The names of globals and attributes in the forward of a class."""
    code = _code(stock, "forward")
    return frozenset() if code is None else frozenset(code.co_names)


def decorated(forward: Any, scope: dict[str, Any]) -> Any:
    """A function as `forward`, with other globals of the code under its decorators.

    None if a decorator does not keep in its closure what it decorates. transformers' checkpointing
    is left out: it wraps the forward of a subclass, such as a razor class, too.
    """
    inner, closure = getattr(forward, "__wrapped__", None), getattr(forward, "__closure__", ())
    if not isinstance(forward, FunctionType):
        return None
    if inner is not None:
        twin = decorated(inner, scope)
        if twin is None or forward.__code__.co_name == CHECKPOINTING:
            return twin
        cells = [getattr(cell, "cell_contents", None) is inner for cell in closure or ()]
        if not any(cells):
            return None
        closure = tuple(
            CellType(twin) if is_inner else cell
            for cell, is_inner in zip(closure, cells, strict=True)
        )
    variables = scope if inner is None else forward.__globals__
    copy = FunctionType(forward.__code__, variables, closure=closure)
    copy.__defaults__, copy.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
    return copy


def _code(stock: type[nn.Module], name: str) -> CodeType | None:
    method: Any = getattr(stock, name, None)
    return getattr(inspect.unwrap(method), "__code__", None)


def _instructions(code: CodeType | None) -> Hashable:
    """The instructions of a function, without the names of its variables and its docstring."""
    if code is None:
        return None
    constants = [c for c in code.co_consts if not isinstance(c, (str, CodeType))]
    inner = [_instructions(c) for c in code.co_consts if isinstance(c, CodeType)]
    return code.co_code, code.co_names, tuple(map(repr, constants)), tuple(inner)
