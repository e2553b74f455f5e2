"""Redirects functions of torch.nn.functional that stock code calls to methods of a razor layer."""

from functools import cache
from typing import Any

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from razorctl.layers.attention.twin import decorated, run_in, running

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


class _Functional:
    """`torch.nn.functional`, but the functions in METHODS are methods of the running layer."""

    def __getattr__(self, name: str) -> Any:
        method = getattr(running().module, METHODS[name], None) if name in METHODS else None
        return getattr(F, name) if method is None else method


@cache
def _twin(forward: Any) -> Any:
    """A function with the code of `forward`, in whose globals `F` is a `_Functional`.

    None if the code may use torch.nn.functional by another name.
    """
    names, variables = forward.__code__.co_names, forward.__globals__
    if variables.get("F") is not F or "F" not in names or "functional" in names:
        return None
    return decorated(forward, {**variables, "F": _Functional()})


def redirected(layer: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `forward(layer, ...)` with the functions in METHODS redirected to methods of `layer`.

    It calls a twin of `forward`. If there is none, it uses a mode, which costs host time at every
    operation.
    """
    twin = _twin(forward)
    if twin is None:
        with FunctionalRedirect(layer):
            return forward(layer, *args, **kwargs)
    return run_in(layer, twin, *args, **kwargs)
