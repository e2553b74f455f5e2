"""Stock linear layers that keep a copy of a small view, not all that it views.

A classifier reads one token of each example: a view of the last norm's output, which autograd would
keep whole.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from razorctl.layers.autocast import compute_dtype
from razorctl.layers.base import save, transforming
from razorctl.layers.by_type import razor_of
from razorctl.layers.heads.token_logits import LogitsFunction
from razorctl.layers.own_forward import InPlace, place

SMALL = 0.25  # share of its storage up to which a copy of an input is kept


class ViewLinearFunction(LogitsFunction):
    """y = x W^T + b, by the stock forward, with the stock gradients from a copy of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        save(ctx, x.clone(memory_format=torch.contiguous_format), weight)
        ctx.dtype, ctx.shape = dtype, x.shape
        return F.linear(x, weight, bias)


class ViewLinear(InPlace):
    """Runs in place of the forward of a stock linear layer."""

    def __init__(self, owner: nn.Linear) -> None:
        self.owner = owner

    def __call__(self, input: Tensor) -> Tensor:
        owner = self.owner
        if not (torch.is_grad_enabled() and owner.weight.requires_grad and _small(input)):
            return type(owner).forward(owner, input)
        y: Tensor = ViewLinearFunction.apply(input, owner.weight, owner.bias, input.dtype)
        return y


def _small(x: Tensor) -> bool:
    """Whether autograd would keep a storage of which `x`, in the dtype of a GEMM, is little."""
    if torch.compiler.is_compiling() or transforming() or x.dtype != compute_dtype(x):
        return False
    return x.nbytes <= SMALL * x.untyped_storage().nbytes()


def find(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of `model` that have stayed stock."""
    linear = [m for m in model.modules() if type(m) is nn.Linear and place(m)]
    return linear if razor_of(nn.Linear) is not None else []
