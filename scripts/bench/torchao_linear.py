"""The linear layers of torchao's int8 mixed-precision training; needs torchao."""

import torch
from torch import Tensor, nn
from torchao.prototype.quantized_training import int8_mixed_precision, int8_mixed_precision_training


class _Traced(int8_mixed_precision._Int8MixedPrecisionTrainingLinearFunction):
    """As torchao's, which Dynamo may not look into; since torch 2.15 it cannot be called so."""


class Int8Linear(int8_mixed_precision.Int8MixedPrecisionTrainingLinear):
    """Runs all three GEMMs in int8, with scales of rows and columns; saves what `nn.Linear` does.

    torchao's other form, weights of a class of their own, runs nothing in int8 up to version 0.18.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(x.device.type):  # torchao's weights cast so
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = (t if t is None else t.to(dtype) for t in (x, weight, bias))
        y: Tensor = _Traced.apply(x, weight, bias, self.config)
        return y


def swap(model: nn.Module) -> None:
    """Turns every linear layer of a timm model but its classifier into an Int8Linear."""
    classifier = model.get_classifier()  # type: ignore[operator]
    for module in model.modules():
        if type(module) is nn.Linear and module is not classifier:
            module.__class__ = Int8Linear
            module.config = int8_mixed_precision_training()
