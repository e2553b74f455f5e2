"""Stock linear layers that store a copy of a small view instead of the tensor that it views.

A classifier reads one token of each example. It is a view of the last norm's output, which autograd
would store whole.
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

SMALL = 0.25  # of its storage: an input up to this share is copied


class ViewLinearFunction(LogitsFunction):
    """y = x W^T + b, the stock forward, with the stock gradients from a copy of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        save(ctx, x.clone(memory_format=torch.contiguous_format), weight)
        ctx.dtype, ctx.shape = dtype, x.shape
        return F.linear(x, weight, bias)


class ViewLinear(InPlace):
    """Replaces the forward of a stock linear layer."""

    def __init__(self, owner: nn.Linear) -> None:
        self.owner = owner

    def __call__(self, input: Tensor) -> Tensor:
        owner = self.owner
        if not (torch.is_grad_enabled() and owner.weight.requires_grad and _small(input)):
            return type(owner).forward(owner, input)
        y: Tensor = ViewLinearFunction.apply(input, owner.weight, owner.bias, input.dtype)
        return y


def _small(x: Tensor) -> bool:
    """Whether `x` is in the dtype of a GEMM, and a small part of the storage that it would keep."""
    if torch.compiler.is_compiling() or transforming() or x.dtype != compute_dtype(x):
        return False
    return x.nbytes <= SMALL * x.untyped_storage().nbytes()


def find(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of `model` that have stayed stock."""
    linear = [m for m in model.modules() if type(m) is nn.Linear and place(m)]
    return linear if razor_of(nn.Linear) is not None else []
