"""The error of an int8 weight gradient, measured in the first backward pass of a linear layer.

A row of dW = dy^T x is computed from a column of dy. A column may have a few entries much larger
than the others, as p - 1 of the target beside p of the other classes. The others then round to zero
in int8, though their sum may be as large. Such a layer runs both gradient GEMMs in dy's dtype.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from razorctl.ops.kernels import capturing
from razorctl.rules.packed import Packed

log = logging.getLogger(__name__)

LARGEST = 0.3  # relative error of a row of dW
SHARE = 0.1  # of the rows of dW, at most, may have a larger one
SAMPLE = 256  # rows of dW that are compared


class Int8Cost:
    """Whether the gradient GEMMs of a layer may run in int8.

    Nothing is measured in a traced, compiled or captured backward pass, where values cannot be
    read, nor for a layer that receives its gradient in int8: it is no output layer.
    """

    def __init__(self) -> None:
        self.measured, self.allowed = False, True

    def products(self, gemms: Any, operands: Sequence[Tensor | Packed], name: str) -> list[Tensor]:
        """dy^T x for each of the operands x; measures in the first pass.

        gemms: `linear.Gemms`; it runs in the dtype of dy from then on, if int8 costs too much.
        """
        products = [gemms.product(x) for x in operands]
        if self.measured or not (gemms.weight_int8 and readable(gemms.dy)):
            return products
        step = -(-gemms.dy.shape[1] // SAMPLE)
        exact = torch.cat([gemms.exact(step).product(x) for x in operands], 1)
        if exact.any():  # a zero-initialized layer gives zeros
            self.measured = True
            share = _share(torch.cat([p[::step] for p in products], 1), exact)
            self.allowed = share <= SHARE
            if not self.allowed:
                log.info(
                    "%s runs its gradient GEMMs in %s: in int8, %.0f %% of the rows of its weight "
                    "gradient have a relative error above %.1f",
                    *(name, str(gemms.dy.dtype).removeprefix("torch."), 100 * share, LARGEST),
                )
                gemms.weight_int8 = gemms.input_int8 = False
                return [gemms.product(x) for x in operands]
        return products

    def state_dict(self) -> dict[str, bool]:
        return {"measured": self.measured, "allowed": self.allowed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.measured, self.allowed = state["measured"], state["allowed"]


def readable(x: Tensor) -> bool:
    """Whether the values of a tensor can be read now."""
    if torch.compiler.is_compiling():
        return False
    return type(x) is Tensor and not (x.is_meta or capturing(x))


def _share(got: Tensor, want: Tensor) -> float:
    """The share of rows of `got` with a relative error above LARGEST."""
    far = (got - want).norm(dim=1) > LARGEST * want.norm(dim=1)
    share: float = far.float().mean().item()
    return share
