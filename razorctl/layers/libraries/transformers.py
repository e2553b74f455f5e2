"""transformers' layers, and the residual branches of some blocks.

Models define copies of a few blocks and attentions. The code of a forward tells which it is
(`known_forwards`, `attention.transformers`). `recognition` tells norms and MLPs by their values.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import activations as stock
from transformers.models.beit import modeling_beit
from transformers.models.bert import modeling_bert
from transformers.models.convnext import modeling_convnext
from transformers.models.dinov2 import modeling_dinov2
from transformers.models.distilbert import modeling_distilbert
from transformers.models.falcon import modeling_falcon
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt2 import modeling_gpt2
from transformers.models.llama import modeling_llama
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.phi3 import modeling_phi3
from transformers.models.roberta import modeling_roberta
from transformers.models.vit import modeling_vit
from transformers.pytorch_utils import Conv1D

from razorctl.layers.attention.redirected_functions import redirected
from razorctl.layers.attention.transformers import InterfaceAttention, redirecting
from razorctl.layers.base import RazorLayer, Swaps
from razorctl.layers.kinds.activation import GELU, QuickGELU, SiLU, SquaredReLU, TanhGELU
from razorctl.layers.kinds.dropout import DropPath
from razorctl.layers.kinds.layer_scale import LayerScale, Scale, ScaledBranches
from razorctl.layers.kinds.linear import Linear
from razorctl.layers.kinds.residual_sum import Adding
from razorctl.layers.known_forwards import alike, forward_names, name_of
from razorctl.layers.recompute.attention import ExpertsAgain
from razorctl.rules.base import Rule


class PostNorm(Adding):
    """The last part of a block of BERT: norm(x + dropout(dense(h)))."""

    references = (modeling_bert.BertSelfOutput, modeling_bert.BertOutput)
    dense: Any
    dropout: Any
    LayerNorm: Any

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        if not self.saving:
            return self.stock(hidden_states, input_tensor)
        f = self.dropout(self.dense(hidden_states))
        y: Tensor = self.LayerNorm(self.added(input_tensor, f))
        return y


class PostNormBlock(Adding):
    """The block of DistilBERT: x = norm(x + attention(x)), then norm(x + ffn(x))."""

    references = (modeling_distilbert.TransformerBlock,)
    attention: Any
    ffn: Any
    sa_layer_norm: Any
    output_layer_norm: Any

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.saving:
            return self.stock(hidden_states, *args, **kwargs)
        f, _ = self.attention(hidden_states, *args, **kwargs)
        x = self.sa_layer_norm(self.added(hidden_states, f))
        y: Tensor = self.output_layer_norm(self.added(x, self.ffn(x)))
        return y


class NormedBranchBlock(Adding):
    """The block of OLMo 2: x = x + norm(attention(x)), then x + norm(mlp(x))."""

    references = (modeling_olmo2.Olmo2DecoderLayer,)
    self_attn: Any
    mlp: Any
    post_attention_layernorm: Any
    post_feedforward_layernorm: Any

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self.saving or args:
            return self.stock(hidden_states, *args, **kwargs)
        f, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
        x = self.added(hidden_states, self.post_attention_layernorm(f))
        y: Tensor = self.post_feedforward_layernorm(self.mlp(x)) + x
        return y


class ScaledDropPath(DropPath):
    """A drop path of transformers; it scales, then drops."""

    references = (modeling_dinov2.Dinov2DropPath,)

    def dropped(self, x: Tensor, factor: Tensor) -> Tensor:
        return x.div(1 - self.drop_prob) * factor.ne(0)


class BeitBlock(ScaledBranches):
    """The block of BEiT; it scales its branches itself."""

    gammas = ("lambda_1", "lambda_2")
    references = (modeling_beit.BeitLayer,)
    layernorm_before: Any
    layernorm_after: Any
    attention: Any
    mlp: Any
    dropout: Any
    drop_path: Any
    patch_size: int
    relative_position_bias: Any

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if not self.saving:
            options = attention_mask, interpolate_pos_encoding, resolution
            return self.stock(hidden_states, *options, **kwargs)
        if self.relative_position_bias is not None:
            assert resolution is not None
            window = resolution[0] // self.patch_size, resolution[1] // self.patch_size
            bias = self.relative_position_bias(
                window, interpolate_pos_encoding, dim_size=hidden_states.shape[1]
            )
            attention_mask = bias if attention_mask is None else bias + attention_mask
        x = hidden_states
        f, _ = self.attention(self.layernorm_before(x), attention_mask=attention_mask, **kwargs)
        x = self.joined(x, self.drop_path(self.branch(0, self.dropout(f))))
        f = self.dropout(self.mlp(self.layernorm_after(x)))
        y: Tensor = self.drop_path(self.branch(1, f)) + x
        return y


class ConvNextBlock(Scale):
    """The block of ConvNeXt; it scales its branch itself."""

    gammas = ("layer_scale_parameter",)
    references = (modeling_convnext.ConvNextLayer,)
    dwconv: Any
    layernorm: Any
    pwconv1: Any
    act: Any
    pwconv2: Any
    drop_path: Any

    def forward(self, features: Tensor) -> Tensor:
        if not self.saving:
            return self.stock(features)
        y = self.layernorm(self.dwconv(features).permute(0, 2, 3, 1))
        y = self.scaled(self.pwconv2(self.act(self.pwconv1(y))), *self.factors(self))
        z: Tensor = features + self.drop_path(y.permute(0, 3, 1, 2))
        return z


class NamedLayerScale(LayerScale):
    """A layer scale of transformers."""

    gammas = ("lambda1",)
    references = (modeling_dinov2.Dinov2LayerScale,)


ALIKE = (
    NamedLayerScale,
    ScaledDropPath,
    BeitBlock,
    ConvNextBlock,
    PostNorm,
    PostNormBlock,
    NormedBranchBlock,
)
_BY_NAME = {name_of(reference): razor for razor in ALIKE for reference in razor.references}


def recognized(kind: type[nn.Module]) -> type[RazorLayer] | None:
    """The razor class of a transformers type outside SWAPS, by its code; else None."""
    names = alike(kind) & _BY_NAME.keys()
    if names:
        return _BY_NAME[min(names)]
    asks = {"get_interface", "config", "_attn_implementation"}
    if asks <= forward_names(kind) and redirecting(kind.forward) is not None:
        return InterfaceAttention
    if "Router" in kind.__name__ and {"linear", "weight"} <= forward_names(kind):
        return Router
    return ExpertsAgain if "Experts" in kind.__name__ else None


class Router(Linear):
    """A router, which scores experts: x weight^T, [tokens, experts]."""

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        return super().columns(module) if cls.multiplies(module) else 1

    @staticmethod
    def multiplies(module: nn.Module) -> bool:
        """Whether the module itself holds a weight [experts, columns]."""
        weight = module._parameters.get("weight")
        return weight is not None and weight.dim() == 2

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return cls.multiplies(module) and super().fits(module, rule)

    @classmethod
    def drawable(cls, module: nn.Module) -> bool:
        return False  # every step needs its weight, for the choice

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.saving or torch.compiler.is_compiling():
            return self.stock(*args, **kwargs)
        stock: Any = super(Linear, self).forward
        return redirected(self, stock.__func__, *args, **kwargs)

    def functional_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear`; for the layer's own weight it stores x by the rule."""
        if weight is self.weight and x.dim() > 1:
            return self.multiplied(x, bias)
        return F.linear(x, weight, bias)


class AddedBiasLinear(Linear):
    """The linear layer of Falcon; it adds the bias in a second operation."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.saving:
            return self.stock(input)
        y = self.multiplied(input, None)
        return y if self.bias is None else y + self.bias

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return x @ weight.T


class TransposedLinear(Linear):
    """The linear layer of GPT-2, whose weight is [in, out]."""

    @staticmethod
    def matrix(weight: Tensor) -> Tensor:
        return weight.t()

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is not None
        shape = *x.shape[:-1], weight.shape[1]
        y = torch.addmm(bias, x.view(-1, x.shape[-1]), weight)
        # Not a view of y: attention recognizes q, k, v by the tensor that they view.
        return torch.ops.aten._unsafe_view(y, shape)  # type: ignore[no-any-return]


SWAPS: Swaps = {
    Conv1D: TransposedLinear,
    modeling_falcon.FalconLinear: AddedBiasLinear,
    stock.GELUActivation: GELU,
    stock.GELUTanh: TanhGELU,
    stock.NewGELUActivation: TanhGELU,
    stock.FastGELUActivation: TanhGELU,
    stock.QuickGELUActivation: QuickGELU,
    stock.SiLUActivation: SiLU,
    stock.ReLUSquaredActivation: SquaredReLU,
}

_BERT_BRANCHES = (
    ("attention.self", "attention.output.dense", "attention.output.dropout"),
    ("intermediate", "output.dense", "output.dropout"),
)
# One dropout module of ViT ends both branches of a layer. It is in neither list, since it stores
# nothing for an input without a gradient.
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
# See `by_type`.
PRE_NORM: dict[type[nn.Module], tuple[tuple[str, ...], ...]] = {
    modeling_vit.ViTLayer: (
        ("layernorm_before", "attention", "dropout"),
        ("layernorm_after", "mlp", "dropout"),
    ),
    modeling_dinov2.Dinov2Layer: (
        ("norm1", "attention", "layer_scale1", "drop_path"),
        ("norm2", "mlp", "layer_scale2", "drop_path"),
    ),
    modeling_llama.LlamaDecoderLayer: (
        ("input_layernorm", "self_attn"),
        ("post_attention_layernorm", "mlp"),
    ),
    modeling_gpt2.GPT2Block: (("ln_1", "attn"), ("ln_2", "mlp")),
    modeling_gemma2.Gemma2DecoderLayer: (
        ("input_layernorm", "self_attn", "post_attention_layernorm"),
        ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
    ),
    modeling_phi3.Phi3DecoderLayer: (
        ("input_layernorm", "self_attn", "resid_attn_dropout"),
        ("post_attention_layernorm", "mlp", "resid_mlp_dropout"),
    ),
}
LINEAR_FIRST = frozenset({modeling_vit.ViTAttention, modeling_vit.ViTMLP})
