"""The linear layer of torchao's int8 mixed-precision training; needs torchao."""

from typing import Any

import torch
from torch import Tensor, nn
from torchao.prototype.quantized_training import int8_mixed_precision as library

_Theirs: Any = library._Int8MixedPrecisionTrainingLinearFunction
_their_backward = _Theirs.backward  # under this name torch 2.11 traces it like any function


class _Function(_Theirs):  # type: ignore[misc]
    """torchao's function, in a form that torch 2.15 runs where Dynamo may not trace it."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # torchao views dy as rows, which fails for an expanded or transposed dy.
        gradients: tuple[Tensor | None, ...] = _their_backward(ctx, dy.contiguous())
        return gradients


class Int8Linear(library.Int8MixedPrecisionTrainingLinear):  # type: ignore[misc]
    """Runs all three GEMMs in int8, with scales per row and column; stores what `nn.Linear` does.

    torchao's other form, a tensor subclass for weights, runs nothing in int8 up to version 0.18. A
    forward pass that stores nothing, as in evaluation, is the stock one, as after deployment.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled()):
            return nn.Linear.forward(self, x)
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(x.device.type):  # as torchao's weights cast
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        y: Tensor = _Function.apply(x.contiguous(), weight, bias, self.config)
        return y
