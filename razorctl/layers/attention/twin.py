"""Copies of functions with other globals, under the same decorators."""

import threading
from types import CellType, FunctionType
from typing import Any

import torch

CHECKPOINTING = "forward_with_checkpointing"


def decorated(forward: Any, scope: dict[str, Any]) -> Any:
    """A copy of `forward`, with its decorators, whose code reads the globals `scope`.

    None if the closure of a decorator does not hold the decorated function. The copy lacks
    transformers' checkpointing, which wraps the forwards of subclasses and so of razor classes.
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


class _Running:
    """The module whose forward is running, in a thread or in the program being compiled."""

    module: Any = None


class _RunningThread(threading.local, _Running):
    pass


_compiled, _eager = _Running(), _RunningThread()


def run_in(module: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `function(module, ...)` with `module` as the running one."""
    place = running()
    before, place.module = place.module, module
    try:
        return function(module, *args, **kwargs)
    finally:
        place.module = before  # so that no reference keeps a deleted model in memory


def running() -> Any:
    """The holder of the razor module whose forward is running; its `module` is None outside."""
    return _compiled if torch.compiler.is_compiling() else _eager
