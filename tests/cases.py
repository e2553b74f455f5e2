"""One small example of every layer that can be swapped, for tests over all of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from timm import layers as timm_layers
from timm.layers import activations as timm_activations
from timm.layers import norm_act as timm_norm_act
from timm.models import _efficientnet_blocks
from timm.models import beit as timm_beit
from timm.models import cait as timm_cait
from timm.models import convnext as timm_convnext
from timm.models import eva as timm_eva
from timm.models import swin_transformer as timm_swin
from timm.models import vision_transformer as timm_vit
from torch import Tensor, nn
from torchvision.models import convnext
from torchvision.ops import misc
from transformers import (
    BertConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    ModernBertConfig,
    Phi3Config,
    activations,
)
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter
from transformers.models.modernbert.modeling_modernbert import ModernBertMLP
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.pytorch_utils import Conv1D

from razorctl.layers.base import LayerSettings, RazorLayer
from razorctl.layers.recognition.razor_class import razor_for
from razorctl.rules.base import Rule, Rules
from razorctl.rules.prune import Centered
from razorctl.rules.registry import RULES, RuleSettings


@dataclass(frozen=True)
class Case:
    """build: the stock layer. shapes: of inputs, odd ones among them. exact: whether the input's
    gradient is, whatever the rule. attention: the backend, for attention alone.
    """

    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    exact: bool = False
    attention: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def layer(self, rule: str | Rule = "dense", device: torch.device | str = "cpu") -> RazorLayer:
        """The razor layer with a rule, by object or by name; see `rule`."""
        module = self.build().to(device).train()
        if isinstance(rule, str):
            rule = self.rule(rule)
        return razor(module, rule, self.attention)

    def rule(self, name: str, density: float = 0.3, unbiased: bool = False) -> Rule:
        """A rule of the layer's width; "topk, centered" is one with the mean correction."""
        module = self.build()
        name, _, centered = name.partition(", ")
        kind = razor_for(module)
        rule = RULES[name].build(RuleSettings(kind.columns(module), density, unbiased))
        return Centered(rule) if centered else rule

    def fits(self, rule: str) -> bool:
        """Whether the layer takes that rule."""
        module = self.build()
        return razor_for(module).fits(module, self.rule(rule))


def razor(module: nn.Module, rule: Rule | None, attention: str | None = None) -> RazorLayer:
    """Swaps one module, as `sparsify` does, for a rule that no method may name for its kind."""
    rules = None if rule is None else both(rule)
    settings = LayerSettings(attention=attention or "auto", rules_of=lambda kind, columns: rules)
    razor_for(module).attach(module, rules, settings)
    assert isinstance(module, RazorLayer)
    return module


def both(rule: Rule) -> Rules:
    """One rule for activations of every width."""
    return Rules(rule, rule)


def stock(module: RazorLayer) -> nn.Module:
    """A swapped module in its stock class again."""
    module.detach()
    return module


def bert(dropout: float = 0.0, implementation: str = "sdpa") -> BertSelfAttention:
    return BertSelfAttention(
        BertConfig(
            hidden_size=24,
            num_attention_heads=3,
            attention_probs_dropout_prob=dropout,
            attn_implementation=implementation,
        )
    )


def gpt2() -> GPT2Attention:
    sizes = {"n_embd": 24, "n_head": 3, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    layer = GPT2Attention(GPT2Config(**sizes, attn_implementation="sdpa"), layer_idx=0)
    layer.is_causal = False  # its eager attention is so by a mask, which the model gives
    return layer


def of_itself(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A hook that gives an attention its one input as query, key and value."""
    return args * 3, {"need_weights": False, **kwargs}


def multihead(**options: Any) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(24, 3, batch_first=True, **options)
    for name, parameter in layer.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    layer.register_forward_pre_hook(of_itself, with_kwargs=True)
    return layer


def decoder_layer() -> nn.Module:
    layer = nn.TransformerDecoderLayer(33, 3, 20, 0.0, "relu", norm_first=True)
    layer.register_forward_pre_hook(from_itself)
    return layer


def from_itself(module: nn.Module, args: Any) -> Any:
    """A hook that gives a decoder its input as memory too."""
    return args * 2


class Functions(nn.Module):
    """A module that calls dropout and activation functions as functions, by several names."""

    p = 0.25

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.gelu(x), self.p, self.training)
        return torch.relu(x) + nn.functional.dropout(y, p=self.p, training=self.training)


def experts() -> nn.Module:
    layer = norm(MixtralExperts(MIXTRAL))
    layer.register_forward_pre_hook(chosen)
    return layer


def chosen(module: nn.Module, args: Any) -> Any:
    """A hook that gives each token to two of three experts."""
    (x,) = args
    choice = torch.arange(2 * len(x), device=x.device).view(-1, 2) % 3
    return x, choice, x.detach()[:, :2].sigmoid()


def scale() -> nn.Module:
    layer = timm_layers.LayerScale(33)
    nn.init.normal_(layer.gamma)
    return layer


def norm(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        nn.init.normal_(parameter, 1.0, 0.3)
    return layer


ROWS = ((5, 33), (3, 7, 33), (1, 33), (2, 3, 5, 33))
GROUPED = (
    {"num_kv_heads": 2}
    if "num_kv_heads" in signature(timm_layers.AttentionRope).parameters
    else {}  # of an older timm
)
TOKENS = ((3, 7, 24), (1, 1, 24), (2, 13, 24))
CASES: dict[str, Case] = {
    "linear": Case(lambda: nn.Linear(33, 17), (*ROWS, (33,)), exact=True),
    "patches": Case(lambda: nn.Conv2d(3, 8, 4, 4), ((2, 3, 9, 8), (1, 3, 4, 4)), exact=True),
    "pointwise": Case(lambda: nn.Conv2d(7, 5, 1), ((2, 7, 3, 5),), exact=True),
    "conv": Case(
        lambda: nn.Conv2d(6, 8, (3, 2), stride=2, padding=(1, 0), dilation=(1, 2)),
        # No narrower: stock's own in fp16 on a CPU then reads beyond its input.
        ((2, 6, 7, 5), (1, 6, 3, 5)),
        exact=True,
    ),
    "same conv": Case(lambda: nn.Conv2d(6, 8, 3, padding="same"), ((2, 6, 5, 7),), exact=True),
    "grouped conv": Case(
        lambda: nn.Conv2d(6, 12, 3, groups=3, bias=False), ((2, 6, 5, 4),), exact=True
    ),
    "layer norm": Case(lambda: norm(nn.LayerNorm(33)), ROWS),
    "layer norm over two axes": Case(lambda: norm(nn.LayerNorm((3, 11))), ((5, 3, 11),)),
    "bare layer norm": Case(lambda: nn.LayerNorm(33, elementwise_affine=False), ROWS),
    "rms norm": Case(lambda: norm(nn.RMSNorm(33)), ROWS),
    "timm layer norm": Case(lambda: norm(timm_layers.LayerNorm(33)), ROWS),
    "timm fp32 layer norm": Case(lambda: norm(timm_layers.LayerNormFp32(33)), ROWS),
    "timm rms norm": Case(lambda: norm(timm_layers.RmsNorm(33)), ROWS),
    "gelu": Case(nn.GELU, ROWS),
    "tanh gelu": Case(lambda: nn.GELU("tanh"), ROWS),
    "silu": Case(nn.SiLU, ROWS),
    "relu": Case(nn.ReLU, ROWS, exact=True),
    "timm gelu": Case(timm_activations.GELU, ROWS),
    "timm tanh gelu": Case(timm_activations.GELUTanh, ROWS),
    "timm quick gelu": Case(timm_activations.QuickGELU, ROWS),
    "timm swish": Case(timm_activations.Swish, ROWS),
    "transformers gelu": Case(activations.GELUActivation, ROWS),
    "transformers python gelu": Case(lambda: activations.GELUActivation(True), ROWS),
    "transformers tanh gelu": Case(activations.GELUTanh, ROWS),
    "transformers new gelu": Case(activations.NewGELUActivation, ROWS),
    "transformers fast gelu": Case(activations.FastGELUActivation, ROWS),
    "transformers quick gelu": Case(activations.QuickGELUActivation, ROWS),
    "transformers silu": Case(activations.SiLUActivation, ROWS),
    "dropout": Case(lambda: nn.Dropout(0.3), ROWS, exact=True),
    "layer scale": Case(scale, ROWS, exact=True),
    "beit block": Case(lambda: timm_beit.Block(24, 3, init_values=0.5), TOKENS),
    "cait block": Case(lambda: timm_cait.LayerScaleBlock(24, 3, init_values=0.5), TOKENS),
    "eva block": Case(lambda: timm_eva.EvaBlock(24, 3, init_values=0.5), TOKENS),
    "post-norm branches": Case(lambda: timm_vit.ResPostBlock(24, 3), TOKENS, exact=True),
    "eva post-norm branches": Case(lambda: timm_eva.EvaBlockPostNorm(24, 3), TOKENS, exact=True),
    "functions": Case(Functions, ROWS),
    "drop path": Case(lambda: timm_layers.DropPath(0.3), ROWS, exact=True),
}

# Of decoders, and gated MLPs.
TINY = {
    "hidden_size": 33,
    "intermediate_size": 20,
    "num_attention_heads": 3,
    "head_dim": 12,
    "hidden_act": "silu",
}
CASES |= {
    "transposed linear": Case(lambda: Conv1D(17, 33), (*ROWS, (33,)), exact=True),
    "squared relu": Case(activations.ReLUSquaredActivation, ROWS),
    "falcon linear": Case(lambda: FalconLinear(33, 17), (*ROWS, (33,)), exact=True),
    "llama rms norm": Case(lambda: norm(LlamaRMSNorm(33)), ROWS),
    "olmo rms norm": Case(lambda: norm(Olmo2RMSNorm(33)), ROWS),
    "gemma rms norm": Case(lambda: norm(GemmaRMSNorm(33)), ROWS),
    "olmo layer norm": Case(lambda: OlmoLayerNorm(33), ROWS),
    "cohere layer norm": Case(lambda: norm(CohereLayerNorm(33)), ROWS),
    "llama mlp": Case(lambda: LlamaMLP(LlamaConfig(**TINY, mlp_bias=True)), ROWS),
    "gemma mlp": Case(lambda: GemmaMLP(GemmaConfig(**TINY | {"hidden_act": "gelu"})), ROWS),
    "phi3 mlp": Case(lambda: Phi3MLP(Phi3Config(**TINY)), ROWS),
    "modernbert mlp": Case(
        lambda: ModernBertMLP(ModernBertConfig(**TINY | {"hidden_activation": "gelu"})), ROWS
    ),
    "timm swiglu": Case(lambda: timm_layers.SwiGLU(33, 20, norm_layer=nn.LayerNorm), ROWS),
    "timm glu mlp": Case(lambda: timm_layers.GluMlp(33, 40, act_layer=nn.SiLU), ROWS),
    "encoder layer": Case(
        lambda: nn.TransformerEncoderLayer(33, 3, 20, 0.0, F.gelu, batch_first=True), ((2, 5, 33),)
    ),
    "decoder layer": Case(decoder_layer, ((2, 5, 33),)),
    "timm packed swiglu": Case(lambda: timm_layers.SwiGLUPacked(33, 40), ROWS),
}
IMAGES = ((2, 6, 5, 7), (3, 6, 4, 4), (1, 6, 1, 9))
CASES |= {  # of networks of convolutions
    "conv1d": Case(lambda: nn.Conv1d(6, 8, 3, stride=2, padding=1), ((2, 6, 9),), exact=True),
    "transposed conv": Case(
        lambda: nn.ConvTranspose2d(6, 8, 3, stride=2, padding=1, output_padding=1),
        ((2, 6, 5, 4), (1, 6, 1, 3)),
        exact=True,
    ),
    "conv of volumes": Case(
        lambda: nn.Conv3d(6, 8, (1, 3, 2), stride=(1, 2, 1), padding=(0, 1, 0), groups=2),
        ((2, 6, 2, 5, 3),),
        exact=True,
    ),
    "patches of volumes": Case(
        lambda: nn.Conv3d(3, 8, (2, 2, 3), (2, 2, 3)), ((2, 3, 4, 5, 6),), exact=True
    ),
    "transposed conv of volumes": Case(
        lambda: nn.ConvTranspose3d(6, 4, 2, stride=2), ((2, 6, 2, 3, 2),), exact=True
    ),
    "transposed conv1d": Case(
        lambda: nn.ConvTranspose1d(6, 9, 2, groups=3, bias=False), ((2, 6, 5),), exact=True
    ),
    "timm same conv": Case(
        lambda: timm_layers.Conv2dSame(6, 8, 3, stride=2), ((2, 6, 5, 8), (1, 6, 6, 7)), exact=True
    ),
    "timm standardized conv": Case(
        lambda: timm_layers.StdConv2d(6, 8, 3, stride=2), IMAGES, exact=True
    ),
    "timm standardized same conv": Case(
        lambda: timm_layers.StdConv2dSame(6, 8, 3, stride=2), IMAGES, exact=True
    ),
    "timm scaled conv": Case(
        lambda: timm_layers.ScaledStdConv2d(6, 8, 3, groups=2, gamma=1.7), IMAGES, exact=True
    ),
    "timm scaled same conv": Case(
        lambda: timm_layers.ScaledStdConv2dSame(6, 8, 3, stride=2), IMAGES, exact=True
    ),
    "batchnorm": Case(lambda: norm(nn.BatchNorm2d(6)), IMAGES),
    "bare batchnorm": Case(
        lambda: nn.BatchNorm2d(6, affine=False, track_running_stats=False), IMAGES
    ),
    "cumulative batchnorm": Case(lambda: norm(nn.BatchNorm2d(6, momentum=None)), IMAGES),
    "batchnorm of rows": Case(lambda: norm(nn.BatchNorm1d(33)), ((5, 33), (3, 33, 4))),
    "batchnorm of volumes": Case(lambda: norm(nn.BatchNorm3d(3)), ((2, 3, 2, 4, 3),)),
    "timm batchnorm": Case(lambda: norm(timm_layers.BatchNormAct2d(6, act_layer=nn.SiLU)), IMAGES),
    "groupnorm": Case(lambda: norm(nn.GroupNorm(3, 6)), (*IMAGES, (2, 6, 4))),
    "bare groupnorm": Case(lambda: nn.GroupNorm(2, 6, affine=False), IMAGES),
    "timm groupnorm": Case(lambda: norm(timm_layers.GroupNorm(6, 2)), IMAGES),
    "timm groupnorm of one": Case(lambda: norm(timm_layers.GroupNorm1(6)), IMAGES),
    "timm groupnorm act": Case(lambda: norm(timm_layers.GroupNormAct(6, 3)), IMAGES),
    "timm groupnorm act of one": Case(lambda: norm(timm_norm_act.GroupNorm1Act(6)), IMAGES),
    "timm image layernorm": Case(lambda: norm(timm_layers.LayerNorm2d(6)), IMAGES),
    "convnext layernorm": Case(
        lambda: norm(ConvNextLayerNorm(6, data_format="channels_first")), IMAGES
    ),
    "torchvision image layernorm": Case(lambda: norm(convnext.LayerNorm2d(6)), IMAGES),
    "hardswish": Case(nn.Hardswish, ROWS),
    "relu6": Case(nn.ReLU6, ROWS, exact=True),
    "leaky relu": Case(lambda: nn.LeakyReLU(0.2), ROWS, exact=True),
    "hardsigmoid": Case(nn.Hardsigmoid, ROWS, exact=True),
    "max pool": Case(lambda: nn.MaxPool2d(3, 2, 1), IMAGES, exact=True),
    "mean pool": Case(
        lambda: nn.AvgPool2d((2, 3), 2, (1, 1), ceil_mode=True, count_include_pad=False),
        IMAGES[:2],
        exact=True,
    ),
    "adaptive mean pool": Case(lambda: nn.AdaptiveAvgPool2d((2, 3)), IMAGES, exact=True),
    "mean pool of volumes": Case(
        lambda: nn.AvgPool3d(2, 2, (1, 0, 1), ceil_mode=True), ((2, 6, 3, 5, 2),), exact=True
    ),
    "adaptive mean pool of volumes": Case(
        lambda: nn.AdaptiveAvgPool3d((1, 2, 2)), ((2, 6, 3, 5, 4),), exact=True
    ),
    "timm squeeze and excitation": Case(
        lambda: timm_layers.SEModule(6, rd_channels=4, add_maxpool=True), IMAGES
    ),
    "timm effective squeeze and excitation": Case(
        lambda: timm_layers.EffectiveSEModule(6, gate_layer="sigmoid"), IMAGES
    ),
    "timm squeeze and excitation of efficientnet": Case(
        lambda: _efficientnet_blocks.SqueezeExcite(6), IMAGES
    ),
    "torchvision squeeze and excitation": Case(lambda: misc.SqueezeExcitation(6, 4), IMAGES),
    "timm convnext block": Case(
        lambda: timm_convnext.ConvNeXtBlock(6, kernel_size=3, ls_init_value=0.5), IMAGES[:2]
    ),
    "timm image layer scale": Case(lambda: norm(timm_layers.LayerScale2d(6)), IMAGES, exact=True),
    "torchvision convnext block": Case(lambda: convnext.CNBlock(6, 0.5, 0.0), IMAGES[:2]),
}
MIXTRAL = MixtralConfig(
    hidden_size=24, intermediate_size=20, num_local_experts=3, experts_implementation="eager"
)
CASES |= {  # whose code runs again
    "window attention": Case(
        lambda: norm(timm_swin.WindowAttention(24, 3, window_size=(2, 4))),
        ((3, 8, 24),),
        attention="sparse-flash",
    ),
    "router": Case(lambda: norm(MixtralTopKRouter(MIXTRAL)), ((13, 24),)),
    "experts": Case(experts, ((17, 24),)),  # fewer rows are kept as they are
}
for backend in ("stored", "sparse-flash"):
    CASES |= {
        f"attention, {backend}": Case(
            lambda: timm_layers.Attention(24, 3, qkv_bias=True), TOKENS, attention=backend
        ),
        f"normed attention, {backend}": Case(
            lambda: timm_layers.Attention(24, 3, qk_norm=True, norm_layer=nn.LayerNorm),
            TOKENS,
            attention=backend,
        ),
        f"rotary attention, {backend}": Case(
            lambda: timm_layers.AttentionRope(24, 4, qkv_fused=False, **GROUPED),
            TOKENS,
            attention=backend,
        ),
        f"beit attention, {backend}": Case(
            lambda: timm_beit.Attention(24, 3, qkv_bias=True), TOKENS, attention=backend
        ),
        f"eva attention, {backend}": Case(
            lambda: timm_eva.EvaAttention(24, 3, scale_norm=False, gated=True),
            TOKENS,
            attention=backend,
        ),
        f"parallel block, {backend}": Case(
            lambda: timm_vit.ParallelScalingBlock(24, 3), TOKENS, attention=backend
        ),
        f"multihead attention, {backend}": Case(multihead, TOKENS, attention=backend),
        f"bert attention, {backend}": Case(bert, TOKENS, attention=backend),
        f"gpt2 attention, {backend}": Case(gpt2, TOKENS, attention=backend),
    }
