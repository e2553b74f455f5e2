"""The in-projection of torch's MultiheadAttention, whose weight belongs to no module."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from razorctl.layers.kinds.linear import Linear
from razorctl.rules.derived import Derived, DerivedCall
from razorctl.rules.packed import Packed


class Projection(Linear):
    """Some rows of the in-projection of an attention, as a linear layer without parameters.

    Attributes:
        owner: the attention that holds the weight and the bias.
        name: the name of the weight in `owner`.
        rows, bias_rows: the rows of the weight and of the bias; None for all.
        swaps_axes: whether the input is [batch, tokens, ...] and the output [tokens, batch, ...].
    """

    owner: Any
    name: str
    rows: slice | None
    bias_rows: slice | None
    swaps_axes: bool

    @classmethod
    def of(cls, owner: nn.Module, name: str, rows: slice | None, bias_rows: slice | None) -> Any:
        """A stock linear layer for `attach`."""
        layer: Any = nn.Module.__new__(nn.Linear)
        nn.Module.__init__(layer)
        weight: Any = getattr(owner, name)
        weight = weight if rows is None else weight[rows]
        layer.out_features, layer.in_features = weight.shape
        layer.name, layer.rows, layer.bias_rows = name, rows, bias_rows
        layer.swaps_axes = owner.batch_first
        vars(layer)["owner"] = owner  # not a submodule
        return layer

    @classmethod
    def drawable(cls, module: nn.Module) -> bool:
        return False

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The chosen rows of the weight, [out, in]."""
        weight: Tensor = getattr(self.owner, self.name)
        return weight if self.rows is None else weight[self.rows]

    @property
    def bias(self) -> Tensor | None:
        """The chosen rows of the bias, [out], or None."""
        bias: Tensor | None = self.owner.in_proj_bias
        return bias if bias is None or self.bias_rows is None else bias[self.bias_rows]

    def arranged(self, t: Tensor) -> Tensor:
        return t.transpose(0, 1) if self.swaps_axes and t.dim() == 3 else t

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(self.arranged(x), weight, bias)

    def stock(self, x: Tensor) -> Tensor:
        """The stock output."""
        return self.product(x, self.weight, self.bias)

    def output_of(self, copy: Packed, x: Tensor, bias: Tensor | None, y: Tensor) -> Derived:
        output = super().output_of(copy, x, bias, self.arranged(y))
        if output.shape == y.shape and not self.swaps_axes:
            return output
        return DerivedCall(y.shape, y.dtype, (output,), call=self.arranged)
