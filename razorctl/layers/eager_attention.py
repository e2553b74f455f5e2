"""Attention by an eager function of transformers, which runs again in the backward pass.

The forward pass is bitwise that of the function, and its probabilities have a gradient as in stock.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from razorctl.layers.autocast import compute_dtype
from razorctl.layers.fused_attention import Attended

# q, k, v [batch, heads, tokens, columns] and a mask -> [batch, tokens, heads, columns] and
# probabilities.
Call = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class EagerAttended(Attended):
    """The outputs of an eager function.

    Args:
        call: the function.
        autocast: whether it ran under autocast.
    """

    call: Call | None = None
    autocast: bool = False

    def outputs(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert self.call is not None
        if not self.autocast:
            return self.call(q, k, v, mask)
        with torch.autocast(q.device.type, self.dtype):
            return self.call(q, k, v, mask)


def form(call: Call, like: Tensor) -> Callable[..., Attended]:
    """Makes an `EagerAttended` from the arguments of an `Attended`; `like` is q as it is given."""
    autocast = compute_dtype(like) != like.dtype or torch.is_autocast_enabled(like.device.type)

    def make(shape: torch.Size, *args: Any, **kwargs: Any) -> Attended:
        batch, heads, tokens, columns = shape
        made = EagerAttended(torch.Size((batch, tokens, heads, columns)), *args, **kwargs)
        return made.replaced(call=call, autocast=autocast)

    return make


def call(
    function: Any, module: nn.Module, inputs: tuple[Tensor | None, ...], kwargs: Mapping[str, Any]
) -> Call | None:
    """An eager function with all arguments but `inputs`; None if it must run in full.

    It must if it reads parameters or further tensors, since autograd keeps neither here, in a
    compiled program, and if no input gets a gradient.

    Args:
        function: as `ALL_ATTENTION_FUNCTIONS` returns it.
        module: its first argument.
        inputs: q, k, v and the mask.
        kwargs: its further arguments.
    """
    code = getattr(function, "__code__", None)
    if (
        code is None
        or torch.compiler.is_compiling()
        or not any(t is not None and t.requires_grad for t in inputs[:3])
    ):
        return None
    read = {*code.co_names, *code.co_varnames, *code.co_consts}
    tensors = {name for name, value in kwargs.items() if isinstance(value, Tensor)}
    weights = {name for name, _ in module.named_parameters(recurse=False)}
    parts = {name for name, part in module.named_children() if [*part.parameters()]}
    if read & (tensors | weights | parts):
        return None
    plain = {name: value for name, value in kwargs.items() if name not in tensors}
    return partial(function, module, **plain)
