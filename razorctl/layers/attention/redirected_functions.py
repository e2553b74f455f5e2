"""Redirects functions of torch.nn.functional that stock code calls to methods of a razor layer."""

import threading
from functools import cache
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from razorctl.layers.attention.twin import decorated

# The name of a function -> the method that is called in its place, if the layer has it.
METHODS = {"scaled_dot_product_attention": "attend", "linear": "functional_linear"}


class FunctionalRedirect(TorchFunctionMode):
    """A mode in which calls of the functions in METHODS go to methods of `layer`."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        pairs = ((getattr(F, name), getattr(layer, new, None)) for name, new in METHODS.items())
        self.methods = {function: method for function, method in pairs if method is not None}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # The mode is off in here, so a method can call the stock function.
        return self.methods.get(func, func)(*args, **(kwargs or {}))


class _Functional(threading.local):
    """`torch.nn.functional`, except that the functions in METHODS are methods of `layer`."""

    layer: Any = None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.layer, METHODS[name], None) if name in METHODS else None
        return getattr(F, name) if method is None else method


_functional = _Functional()


@cache
def _twin(forward: Any) -> Any:
    """A function with the code of `forward`, in whose globals `F` is `_functional`.

    None if the code may use torch.nn.functional by another name.
    """
    names, variables = forward.__code__.co_names, forward.__globals__
    if variables.get("F") is not F or "F" not in names or "functional" in names:
        return None
    return decorated(forward, {**variables, "F": _functional})


def redirected(layer: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `forward(layer, ...)` with the functions in METHODS redirected to methods of `layer`.

    It calls a twin of `forward`. If there is none, it uses a mode, which costs host time at every
    operation.
    """
    twin = _twin(forward)
    if twin is None:
        with FunctionalRedirect(layer):
            return forward(layer, *args, **kwargs)
    before, _functional.layer = _functional.layer, layer
    try:
        return twin(layer, *args, **kwargs)
    finally:
        _functional.layer = before
