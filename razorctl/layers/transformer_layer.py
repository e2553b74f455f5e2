"""torch's TransformerEncoderLayer and TransformerDecoderLayer, whose activation is a function."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from razorctl.layers.activation import GELU, Hardswish, LeakyReLU, ReLU, ReLU6, SiLU
from razorctl.layers.base import LayerSettings, RazorLayer, Swaps
from razorctl.rules.base import Rule, Rules

# Functions of torch -> the stock layers that compute the same, and their razor classes.
FUNCTIONS: dict[Any, tuple[type[nn.Module], type[RazorLayer]]] = {
    F.relu: (nn.ReLU, ReLU),
    torch.relu: (nn.ReLU, ReLU),
    F.gelu: (nn.GELU, GELU),
    F.silu: (nn.SiLU, SiLU),
    F.hardswish: (nn.Hardswish, Hardswish),
    F.relu6: (nn.ReLU6, ReLU6),
    F.leaky_relu: (nn.LeakyReLU, LeakyReLU),
}


class TransformerLayer(RazorLayer):
    """A layer with a razor activation in place of the function that it calls.

    All else in it is a layer of its own. stock_activation: the function.
    """

    kind: ClassVar[str] = "activation"
    activation: Any
    stock_activation: Any

    @classmethod
    def function_of(cls, module: nn.Module) -> str | None:
        stock, razor = FUNCTIONS.get(module.activation, (None, None))
        return None if stock is None or razor is None else razor.function_of(stock())

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return module.activation in FUNCTIONS and rule.elementwise

    @classmethod
    def attach(cls, module: nn.Module, rules: Rules | None, settings: LayerSettings) -> None:
        super().attach(module, rules, settings)
        assert isinstance(module, TransformerLayer)
        stock, razor = FUNCTIONS[module.activation]
        layer = stock()
        razor.attach(layer, rules, settings)
        module.stock_activation = module.activation
        del module.activation  # else torch keeps both
        module.activation = layer.train(module.training)

    def detach(self) -> None:
        del self.activation
        self.activation = self.stock_activation
        del self.stock_activation
        super().detach()


SWAPS: Swaps = {
    nn.TransformerEncoderLayer: TransformerLayer,
    nn.TransformerDecoderLayer: TransformerLayer,
}
# A block whose norms come first; its activation is a module once it is a razor layer.
PRE_NORM: dict[type[nn.Module], tuple[tuple[str, ...], ...]] = {
    nn.TransformerEncoderLayer: (
        ("norm1", "self_attn", "dropout1"),
        ("norm2", "linear1", "activation", "dropout", "linear2", "dropout2"),
    ),
}
LINEAR_FIRST = frozenset[type[nn.Module]]({nn.MultiheadAttention, nn.Linear})
