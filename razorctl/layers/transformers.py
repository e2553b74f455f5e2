"""transformers' own layers, the attention of four of its models, and their residual branches.

An attention module asks an AttentionInterface for the function that the model's configuration
names. While a model is sparsified, the configuration names `razor_eager` in place of `eager`, or
`razor_sdpa` in place of `sdpa`. These functions call `attend` of a module of a razor class, and the
stock function for any other module.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations as stock
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.bert import modeling_bert
from transformers.models.distilbert import modeling_distilbert
from transformers.models.roberta import modeling_roberta
from transformers.models.vit import modeling_vit

from razorctl.layers import activation
from razorctl.layers.attention import Attention, masked
from razorctl.layers.base import RazorLayer, Settings
from razorctl.rules.base import Rules

PREFIX = "razor_"


class InterfaceAttention(Attention):
    """Base of attentions that call an AttentionInterface."""

    scales_query = False
    config: Any
    is_causal: bool

    @classmethod
    def head_width(cls, module: nn.Module) -> int:
        sizes = (getattr(module, name, None) for name in ("attention_head_size", "head_dim"))
        return next(size for size in sizes if isinstance(size, int))

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        return cls.head_width(module)

    @classmethod
    def refusal(cls, module: nn.Module, backend: str) -> str | None:
        config: Any = module.config
        if config._attn_implementation.startswith(PREFIX):
            return (
                "shares its config with a model that is sparsified already; build it with "
                "a copy of that config."
            )
        if config._attn_implementation not in ("eager", "sdpa"):
            return (
                f"runs {config._attn_implementation!r}; build the model with "
                "attn_implementation='sdpa'."
            )
        if config.output_attentions:
            return (
                "returns its probabilities, which razor attention cannot; set "
                "config.output_attentions to False."
            )
        return super().refusal(module, backend)

    @classmethod
    def attach(cls, module: nn.Module, rules: Rules | None, settings: Settings) -> None:
        super().attach(module, rules, settings)
        config: Any = module.config
        if not config._attn_implementation.startswith(PREFIX):  # layers share it
            config._attn_implementation = PREFIX + config._attn_implementation

    def detach(self) -> None:
        self.config._attn_implementation = self.config._attn_implementation.removeprefix(PREFIX)
        super().detach()


def _interface(name: str) -> Any:
    """The attention function that replaces the stock one of that name."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        razor = module if isinstance(module, InterfaceAttention) and module.saving else None
        if razor and (razor.backend != "stored" or razor.rules is not None):
            causal = razor.is_causal and attention_mask is None and query.shape[2] > 1
            out = razor.attend(
                query,
                key,
                value,
                attention_mask,
                dropout_p=kwargs.get("dropout", 0.0),
                is_causal=causal,
                scale=kwargs.get("scaling"),
            )
            return out.transpose(1, 2).contiguous(), None
        homes = (vars(sys.modules[c.__module__]) for c in type(module).__mro__)
        eager = next(h["eager_attention_forward"] for h in homes if "eager_attention_forward" in h)
        if razor and attention_mask is not None and attention_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attention_mask, dtype=query.dtype)
            attention_mask = masked(zeros, attention_mask)
        function = ALL_ATTENTION_FUNCTIONS.get_interface("eager" if razor else name, eager)
        return function(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]

    return attention


for name, mask in (("eager", eager_mask), ("sdpa", sdpa_mask)):
    AttentionInterface.register(PREFIX + name, _interface(name))
    AttentionMaskInterface.register(PREFIX + name, mask)


class RazorBertSelfAttention(InterfaceAttention, modeling_bert.BertSelfAttention):  # type: ignore[misc]
    """transformers' BertSelfAttention."""


class RazorBertCrossAttention(InterfaceAttention, modeling_bert.BertCrossAttention):  # type: ignore[misc]
    """transformers' BertCrossAttention."""


class RazorRobertaSelfAttention(InterfaceAttention, modeling_roberta.RobertaSelfAttention):  # type: ignore[misc]
    """transformers' RobertaSelfAttention."""


class RazorRobertaCrossAttention(InterfaceAttention, modeling_roberta.RobertaCrossAttention):  # type: ignore[misc]
    """transformers' RobertaCrossAttention."""


class RazorDistilBertSelfAttention(InterfaceAttention, modeling_distilbert.DistilBertSelfAttention):  # type: ignore[misc]
    """transformers' DistilBertSelfAttention."""


class RazorViTAttention(InterfaceAttention, modeling_vit.ViTAttention):  # type: ignore[misc]
    """transformers' ViTAttention."""

    softmax_dtype = torch.float32


class RazorGELUActivation(activation.ExactGELU, stock.GELUActivation):  # type: ignore[misc]
    """transformers' GELUActivation."""


class RazorGELUTanh(activation.TanhGELU, stock.GELUTanh):  # type: ignore[misc]
    """transformers' GELUTanh."""


class RazorNewGELUActivation(activation.TanhGELU, stock.NewGELUActivation):  # type: ignore[misc]
    """transformers' NewGELUActivation."""


class RazorFastGELUActivation(activation.TanhGELU, stock.FastGELUActivation):  # type: ignore[misc]
    """transformers' FastGELUActivation."""


class RazorQuickGELUActivation(activation.QuickGELU, stock.QuickGELUActivation):  # type: ignore[misc]
    """transformers' QuickGELUActivation."""


class RazorSiLUActivation(activation.SiLU, stock.SiLUActivation):  # type: ignore[misc]
    """transformers' SiLUActivation."""


SWAPS: dict[type[nn.Module], type[RazorLayer]] = {
    razor.__bases__[1]: razor
    for razor in (
        RazorBertSelfAttention,
        RazorBertCrossAttention,
        RazorRobertaSelfAttention,
        RazorRobertaCrossAttention,
        RazorDistilBertSelfAttention,
        RazorViTAttention,
        RazorGELUActivation,
        RazorGELUTanh,
        RazorNewGELUActivation,
        RazorFastGELUActivation,
        RazorQuickGELUActivation,
        RazorSiLUActivation,
    )
}

_BERT_BRANCHES = (
    ("attention.self", "attention.output.dense", "attention.output.dropout"),
    ("intermediate", "output.dense", "output.dropout"),
)
# One dropout module of ViT ends both branches of a layer. It is a member of neither, since it saves
# nothing for an input without grad.
BRANCHES: dict[type[nn.Module], tuple[tuple[str, ...], ...]] = {
    modeling_bert.BertLayer: _BERT_BRANCHES,
    modeling_roberta.RobertaLayer: _BERT_BRANCHES,
    modeling_distilbert.TransformerBlock: (("attention", "attention.out_lin"), ("ffn",)),
    modeling_vit.ViTLayer: (
        ("layernorm_before", "attention", "attention.o_proj"),
        ("layernorm_after", "mlp"),
    ),
}
# Blocks that are pre-norm connections alone, and the modules in them that may follow a norm.
PRE_NORM: dict[type[nn.Module], tuple[tuple[str, ...], ...]] = {
    modeling_vit.ViTLayer: (
        ("layernorm_before", "attention", "dropout"),
        ("layernorm_after", "mlp", "dropout"),
    ),
}
LINEAR_FIRST = frozenset({modeling_vit.ViTAttention, RazorViTAttention, modeling_vit.ViTMLP})
