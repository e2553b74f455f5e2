"""Gradients that cannot be differentiated again, since they come from copies."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

MESSAGE = b"razor layers give no second derivative; call razorctl.restore(model) before it."
Gradients = tuple[Tensor | None, ...]


def once_differentiable(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """A backward pass whose results raise an error when they are differentiated.

    torch's `once_differentiable` raises only if the incoming gradient requires grad. A second
    derivative with respect to the weights would then be lost in silence.
    """

    @wraps(backward)
    def once(ctx: Any, *gradients: Tensor | None) -> Gradients:
        with torch.no_grad():
            given = backward(ctx, *gradients)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return given
        error = torch._C._functions.DelayedError(MESSAGE, len(given))
        ended: Gradients = error(*map(_leaf, given))  # type: ignore[arg-type]
        return ended

    return once


def _leaf(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach().requires_grad_()
