"""torch's TransformerEncoderLayer and TransformerDecoderLayer; their activation is a function."""

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from razorctl.layers.base import LayerSettings, RazorLayer, Swaps
from razorctl.layers.kinds.residual_sum import added
from razorctl.layers.recognition.called_functions import FUNCTIONS
from razorctl.rules.base import Rule, Rules


class TransformerLayer(RazorLayer):
    """A block with a razor activation in place of the function that it calls.

    Its other parts are modules. stock_activation: the function.
    """

    kind: ClassVar[str] = "activation"
    activation: Any
    stock_activation: Any
    norm_first: bool
    norm1: Any
    norm2: Any
    _sa_block: Any
    _ff_block: Any

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
        del module.activation  # else both would stay
        module.activation = layer.train(module.training)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's decoder would replace an activation that is a module by ReLU.
        nn.Module.__setstate__(self, state)  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        del self.activation
        self.activation = self.stock_activation
        del self.stock_activation
        super().detach()


class EncoderLayer(TransformerLayer):
    """torch's TransformerEncoderLayer: x = norm1(x + attention(x)), then norm2(x + mlp(x))."""

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if not self.saving or self.norm_first:
            return self.stock(src, src_mask, src_key_padding_mask, is_causal)
        other = None if src_mask is None else src_mask.dtype
        padding = F._canonical_mask(
            src_key_padding_mask, "src_key_padding_mask", other, "src_mask", src.dtype
        )
        mask = F._canonical_mask(src_mask, "src_mask", None, "", src.dtype, check_other=False)
        x = self.norm1(added(self, src, self._sa_block(src, mask, padding, is_causal=is_causal)))
        y: Tensor = self.norm2(added(self, x, self._ff_block(x)))
        return y


class DecoderLayer(TransformerLayer):
    """torch's TransformerDecoderLayer: an `EncoderLayer` with attention to a memory."""

    norm3: Any
    _mha_block: Any

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        masks = tgt_mask, tgt_key_padding_mask, tgt_is_causal
        of_memory = memory_mask, memory_key_padding_mask, memory_is_causal
        if not self.saving or self.norm_first:
            each = (mask for pair in zip(masks, of_memory, strict=True) for mask in pair)
            return self.stock(tgt, memory, *each)
        x = self.norm1(added(self, tgt, self._sa_block(tgt, *masks)))
        x = self.norm2(added(self, x, self._mha_block(x, memory, *of_memory)))
        y: Tensor = self.norm3(added(self, x, self._ff_block(x)))
        return y


SWAPS: Swaps = {
    nn.TransformerEncoderLayer: EncoderLayer,
    nn.TransformerDecoderLayer: DecoderLayer,
}
# See `by_type`. `activation` is a module only in a razor layer.
PRE_NORM: dict[type[nn.Module], tuple[tuple[str, ...], ...]] = {
    nn.TransformerEncoderLayer: (
        ("norm1", "self_attn", "dropout1"),
        ("norm2", "linear1", "activation", "dropout", "linear2", "dropout2"),
    ),
}
LINEAR_FIRST = frozenset[type[nn.Module]]({nn.MultiheadAttention, nn.Linear})
