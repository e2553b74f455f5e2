"""Redirects the fused attention that stock code calls to a razor attention."""

import threading
from functools import cache
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from razorctl.layers.attention import Attention


class SdpaRedirect(TorchFunctionMode):
    """Inside it, calls of `F.scaled_dot_product_attention` go to `attention.attend`."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # The mode is off in here, so `attend` can call the stock function.
        if func is F.scaled_dot_product_attention:
            func = self.attention.attend
        return func(*args, **(kwargs or {}))


class _Functional(threading.local):
    """`torch.nn.functional` with `attention.attend` as its fused attention."""

    attention: Attention

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    def scaled_dot_product_attention(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.attention.attend(*args, **kwargs)


_functional = _Functional()


@cache
def _twin(forward: Any) -> Any:
    """A function with the code of `forward`, in whose globals `F` is `_functional`.

    None if the code may use torch.nn.functional by another name.
    """
    names, variables = forward.__code__.co_names, forward.__globals__
    if variables.get("F") is not F or "F" not in names or "functional" in names:
        return None
    variables = {**variables, "F": _functional}
    twin = FunctionType(forward.__code__, variables, closure=forward.__closure__)
    twin.__defaults__, twin.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
    return twin


def redirected(attention: Attention, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `forward(attention, ...)` with its fused attention redirected to `attention.attend`.

    A mode looks at every operation, which takes the host long, so it is used only if there is no
    other way.
    """
    twin = _twin(forward)
    if twin is None:
        with SdpaRedirect(attention):
            return forward(attention, *args, **kwargs)
    before = vars(_functional).get("attention")
    _functional.attention = attention
    try:
        return twin(attention, *args, **kwargs)
    finally:
        _functional.attention = before  # type: ignore[assignment]
