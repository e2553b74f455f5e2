"""transformers' own layers, its layers that models copy, and the residual branches of some blocks.

A norm, a gated MLP or an attention of any model is recognized by the code of its forward; see
`bytecode`. An attention module asks an AttentionInterface for the function that the model's
configuration names. While a model is sparsified, the configuration names `razor_eager` in place of
`eager`, or `razor_sdpa` in place of `sdpa`. These functions call `attend` of a module of a razor
class, and the stock function for any other module and for whatever `attend` cannot do.
"""

import sys
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import activations as stock
from transformers.integrations.sdpa_attention import use_gqa_in_sdpa
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.bert import modeling_bert
from transformers.models.distilbert import modeling_distilbert
from transformers.models.gemma import modeling_gemma
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.phi3 import modeling_phi3
from transformers.models.roberta import modeling_roberta
from transformers.models.t5 import modeling_t5
from transformers.models.vit import modeling_vit
from transformers.pytorch_utils import Conv1D

from razorctl.layers.activation import GELU, QuickGELU, SiLU, TanhGELU
from razorctl.layers.attention import Attention, apply_mask
from razorctl.layers.base import LayerSettings, RazorLayer, Swaps
from razorctl.layers.bytecode import forward_names, same_forward, strings_near
from razorctl.layers.gated_mlp import GatedMLP
from razorctl.layers.linear import Linear
from razorctl.layers.norm import Norm
from razorctl.rules.base import Rules

PREFIX = "razor_"


class InterfaceAttention(Attention):
    """Base of attentions that call an AttentionInterface."""

    scales_query = False
    config: Any

    @property
    def softmax_dtype(self) -> torch.dtype | None:  # type: ignore[override]
        """Single precision if the stock eager attention takes its softmax so."""
        eager = _eager(self)
        code = getattr(eager, "__code__", None)
        return torch.float32 if code is not None and "float32" in code.co_names else None

    @classmethod
    def head_width(cls, module: nn.Module) -> int:
        """The columns of q and k in one head; 0 if they are unknown."""
        sizes = [getattr(module, name, None) for name in ("attention_head_size", "head_dim")]
        return next((size for size in sizes if isinstance(size, int)), 0)

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        return cls.head_width(module) or 1

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
        if config._attn_implementation == "eager" and getattr(
            module, "reorder_and_upcast_attn", False
        ):
            return "reorders its eager attention; build the model with attn_implementation='sdpa'."
        if config.output_attentions:
            return (
                "returns its probabilities, which razor attention cannot; set "
                "config.output_attentions to False."
            )
        return super().refusal(module, backend)

    @classmethod
    def attach(cls, module: nn.Module, rules: Rules | None, settings: LayerSettings) -> None:
        super().attach(module, rules, settings)
        config: Any = module.config
        if not config._attn_implementation.startswith(PREFIX):  # layers share it
            config._attn_implementation = PREFIX + config._attn_implementation

    def detach(self) -> None:
        self.config._attn_implementation = self.config._attn_implementation.removeprefix(PREFIX)
        super().detach()


def _eager(module: nn.Module) -> Any:
    """The eager attention of the file that a module is from; None if there is none."""
    homes = (vars(sys.modules[c.__module__]) for c in type(module).__mro__)
    name = "eager_attention_forward"
    return next((home[name] for home in homes if name in home), None)


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
        stored = razor is not None and razor.backend == "stored" and razor.rules is None
        if razor is not None and not stored:
            out = _attended(razor, query, key, value, attention_mask, kwargs)
            if out is not None:
                return out.transpose(1, 2).contiguous(), None
        if stored and attention_mask is not None and attention_mask.dtype == torch.bool:
            zeros = torch.zeros_like(attention_mask, dtype=query.dtype)
            attention_mask = apply_mask(zeros, attention_mask)
        used = "eager" if stored else name
        function = ALL_ATTENTION_FUNCTIONS.get_interface(used, _eager(module))
        return function(module, query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]

    return attention


# Arguments that change the result, beside queries, keys, values and mask.
_MORE = ("position_bias", "softcap", "s_aux", "cache", "head_mask", "sinks")


def _attended(
    razor: InterfaceAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor | None:
    """The output of `sdpa_attention_forward` of transformers, computed by `attend`.

    None where that function does more than fused attention.
    """
    causal = kwargs.get("is_causal")
    causal = getattr(razor, "is_causal", True) if causal is None else causal
    queries, keys = query.shape[2], key.shape[2]
    causal = bool(causal and mask is None and queries > 1)
    groups = getattr(razor, "num_key_value_groups", 1)
    single = queries == 1 and groups > 1  # then stock joins the queries of a group
    if any(kwargs.get(name) is not None for name in _MORE) or single or (causal and keys > queries):
        return None
    native = groups > 1 and use_gqa_in_sdpa(mask, key, value)
    return razor.attend(
        query,
        key,
        value,
        mask,
        dropout_p=kwargs.get("dropout", 0.0),
        is_causal=causal,
        scale=kwargs.get("scaling"),
        enable_gqa=native,
        repeats=1 if native else groups,
    )


for name, mask in (("eager", eager_mask), ("sdpa", sdpa_mask)):
    AttentionInterface.register(PREFIX + name, _interface(name))
    AttentionMaskInterface.register(PREFIX + name, mask)


class ScaledRMSNorm(Norm):
    """An RMSNorm of transformers that multiplies x_hat by its weight."""

    centers = False
    references: ClassVar[tuple[type[nn.Module], ...]] = (
        modeling_llama.LlamaRMSNorm,
        modeling_olmo2.Olmo2RMSNorm,
        modeling_t5.T5LayerNorm,
    )

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        weight: Tensor = module.weight  # type: ignore[assignment]
        return weight.numel()

    @property
    def normalized_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """The shape of the weight."""
        return tuple(self.weight.shape)

    def epsilon(self, x: Tensor) -> float:
        eps: float = self.variance_epsilon  # type: ignore[assignment]
        return eps


class CenteredRMSNorm(ScaledRMSNorm):
    """An RMSNorm of transformers that multiplies x_hat by 1 + its weight."""

    references = (modeling_gemma.GemmaRMSNorm,)

    def scale(self, weight: Tensor) -> Tensor:
        return 1 + weight.float()

    def epsilon(self, x: Tensor) -> float:
        eps: float = self.eps
        return eps


class SeparateGatedMLP(GatedMLP):
    """The gated MLP of most language models."""

    activation_name = "act_fn"
    references = (modeling_llama.LlamaMLP,)
    gate_proj: Any
    up_proj: Any
    down_proj: Any

    def gated_forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))
        return y


class JoinedGatedMLP(GatedMLP):
    """A gated MLP with one layer before the product."""

    activation_name = "activation_fn"
    references = (modeling_phi3.Phi3MLP,)
    gate_up_proj: Any
    down_proj: Any

    def gated_forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self.gated(*self.gate_up_proj(x).chunk(2, dim=-1)))
        return y


ALIKE = (ScaledRMSNorm, CenteredRMSNorm, SeparateGatedMLP, JoinedGatedMLP)


@cache
def recognized(kind: type[nn.Module]) -> type[RazorLayer] | None:
    """The razor class of a type of transformers that is not in SWAPS, by its code; else None."""
    for razor in ALIKE:
        if any(same_forward(kind, reference) for reference in razor.references):
            return razor
    asks = {"ALL_ATTENTION_FUNCTIONS", "get_interface", "config", "_attn_implementation"}
    if asks <= forward_names(kind) and not _compares(kind):
        return InterfaceAttention
    return None


def _compares(kind: type[nn.Module]) -> bool:
    """Whether the model of an attention asks which implementation it has, beside that of GPT-2."""
    if "reorder_and_upcast_attn" in forward_names(kind):
        return False
    members = vars(sys.modules[kind.__module__]).values()
    classes = [c for c in members if isinstance(c, type) and c.__module__ == kind.__module__]
    return any({"sdpa", "eager"} & strings_near(c, "_attn_implementation") for c in classes)


class TransposedLinear(Linear):
    """The linear layer of GPT-2, whose weight is [in, out]."""

    @staticmethod
    def matrix(weight: Tensor) -> Tensor:
        return weight.t()

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None
        shape = *x.shape[:-1], weight.shape[1]
        return torch.addmm(bias, x.view(-1, x.shape[-1]), weight).view(shape)


SWAPS: Swaps = {
    Conv1D: TransposedLinear,
    stock.GELUActivation: GELU,
    stock.GELUTanh: TanhGELU,
    stock.NewGELUActivation: TanhGELU,
    stock.FastGELUActivation: TanhGELU,
    stock.QuickGELUActivation: QuickGELU,
    stock.SiLUActivation: SiLU,
}

_BERT_BRANCHES = (
    ("attention.self", "attention.output.dense", "attention.output.dropout"),
    ("intermediate", "output.dense", "output.dropout"),
)
# One dropout module of ViT ends both branches of a layer. It is a member of neither, since it keeps
# nothing for an input without grad.
BRANCHES: dict[type[nn.Module], tuple[tuple[str, ...], ...]] = {
    modeling_bert.BertLayer: _BERT_BRANCHES,
    modeling_roberta.RobertaLayer: _BERT_BRANCHES,
    modeling_distilbert.TransformerBlock: (("attention", "attention.out_lin"), ("ffn",)),
    modeling_vit.ViTLayer: (
        ("layernorm_before", "attention", "attention.o_proj"),
        ("layernorm_after", "mlp"),
    ),
    modeling_gpt2.GPT2Block: (("ln_1", "attn", "attn.resid_dropout"), ("ln_2", "mlp")),
    modeling_llama.LlamaDecoderLayer: (
        ("input_layernorm", "self_attn", "self_attn.o_proj"),
        ("post_attention_layernorm", "mlp"),
    ),
    modeling_gemma2.Gemma2DecoderLayer: (
        ("input_layernorm", "self_attn", "post_attention_layernorm"),
        ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
    ),
    modeling_olmo2.Olmo2DecoderLayer: (
        ("self_attn", "post_attention_layernorm"),
        ("mlp", "post_feedforward_layernorm"),
    ),
}
# Blocks that are pre-norm connections alone, and the modules in them that may follow a norm.
PRE_NORM: dict[type[nn.Module], tuple[tuple[str, ...], ...]] = {
    modeling_vit.ViTLayer: (
        ("layernorm_before", "attention", "dropout"),
        ("layernorm_after", "mlp", "dropout"),
    ),
}
LINEAR_FIRST = frozenset({modeling_vit.ViTAttention, modeling_vit.ViTMLP})
