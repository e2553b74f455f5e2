"""timm's own layers, and the residual branches of its blocks."""

from typing import Any

from timm import layers as stock
from timm.layers import activations as stock_activations
from timm.models import (
    beit,
    eva,
    swin_transformer,
    swin_transformer_v2,
    vision_transformer,
    vision_transformer_relpos,
)
from torch import Tensor, nn

from razorctl.layers import activation
from razorctl.layers.attention import Attention, Diverted
from razorctl.layers.base import RazorLayer, Settings
from razorctl.layers.gated import Gated
from razorctl.layers.norm import Norm
from razorctl.layers.scale import LayerScale
from razorctl.rules.base import Rule, Rules


class TimmAttention(Attention):
    """Base of attentions that project to q, k, v and call fused attention if `fused_attn`.

    stock_fused_attn: what `fused_attn` was before `attach`.
    """

    stock_fused_attn: bool

    @property
    def fused_attn(self) -> bool:
        """The stock setting where nothing is saved, else what the backend needs."""
        if not self.saving:
            return self.stock_fused_attn
        return self.backend != "stored" or self.rules is not None

    @fused_attn.setter
    def fused_attn(self, setting: bool) -> None:
        self.stock_fused_attn = setting

    @classmethod
    def attach(cls, module: nn.Module, rules: Rules | None, settings: Settings) -> None:
        # Torch 2.11 cannot compile a property that shadows an attribute of the same name.
        setting = vars(module).pop("fused_attn")
        super().attach(module, rules, settings)
        module.fused_attn = setting

    def detach(self) -> None:
        setting = self.stock_fused_attn
        del self.stock_fused_attn
        super().detach()
        self.fused_attn = setting

    @classmethod
    def head_width(cls, module: nn.Module) -> int:
        width: int = module.head_dim  # type: ignore[assignment]
        return width

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        return cls.head_width(module)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if not self.saving or self.rules is None:
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        with Diverted(self):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]


class RazorAttention(TimmAttention, stock.Attention):  # type: ignore[misc]
    """timm's attention of a ViT."""


class RazorAttentionRope(TimmAttention, stock.AttentionRope):  # type: ignore[misc]
    """timm's attention with rotary positions."""


class RazorLayerNorm(Norm, stock.LayerNorm):  # type: ignore[misc]
    """timm's LayerNorm."""

    @property
    def plain(self) -> bool:  # type: ignore[override]
        """The stock setting may ask for APEX."""
        return not self._fast_norm


class RazorLayerNormFp32(Norm, stock.LayerNormFp32):  # type: ignore[misc]
    """timm's LayerNorm in single precision."""


class RazorRmsNorm(Norm, stock.RmsNorm):  # type: ignore[misc]
    """timm's RMSNorm."""

    centers = False


class RazorLayerScale(LayerScale, stock.LayerScale):  # type: ignore[misc]
    """timm's layer scale."""


class RazorGELU(activation.ExactGELU, stock_activations.GELU):  # type: ignore[misc]
    """timm's GELU."""


class RazorGELUTanh(activation.TanhGELU, stock_activations.GELUTanh):  # type: ignore[misc]
    """timm's tanh GELU."""


class RazorQuickGELU(activation.QuickGELU, stock_activations.QuickGELU):  # type: ignore[misc]
    """timm's quick GELU."""


class RazorSwish(activation.SiLU, stock_activations.Swish):  # type: ignore[misc]
    """timm's SiLU."""


class RazorSwiGLU(Gated, stock.SwiGLU):  # type: ignore[misc]
    """timm's gated MLP of two layers before the product."""

    activation_name = "act"
    fc1_g: Any
    fc1_x: Any
    fc2: Any
    drop1: Any
    drop2: Any
    norm: Any

    def gated_forward(self, x: Tensor) -> Tensor:
        y = self.drop1(self.gated(self.fc1_g(x), self.fc1_x(x)))
        return self.drop2(self.fc2(self.norm(y)))  # type: ignore[no-any-return]


class RazorGluMlp(Gated, stock.GluMlp):  # type: ignore[misc]
    """timm's gated MLP of one layer before the product."""

    activation_name = "act"
    fc1: Any
    fc2: Any
    drop1: Any
    drop2: Any
    norm: Any

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        last: bool = module.chunk_dim == -1  # type: ignore[assignment]
        return last and super().fits(module, rule)

    def gated_forward(self, x: Tensor) -> Tensor:
        first, second = self.fc1(x).chunk(2, dim=-1)
        gate, up = (second, first) if self.gate_last else (first, second)
        y = self.drop1(self.gated(gate, up))
        return self.drop2(self.fc2(self.norm(y)))  # type: ignore[no-any-return]


# Drop path has no razor class: its stock form saves one number per example.
SWAPS: dict[type[nn.Module], type[RazorLayer]] = {
    razor.__bases__[1]: razor
    for razor in (
        RazorAttention,
        RazorAttentionRope,
        RazorLayerNorm,
        RazorLayerNormFp32,
        RazorRmsNorm,
        RazorLayerScale,
        RazorGELU,
        RazorGELUTanh,
        RazorQuickGELU,
        RazorSwish,
        RazorSwiGLU,
        RazorGluMlp,
    )
}

_PLAIN = (("norm1", "attn", "drop_path1"), ("norm2", "mlp", "drop_path2"))
_SCALED = (("norm1", "attn", "ls1", "drop_path1"), ("norm2", "mlp", "ls2", "drop_path2"))
# Blocks that are pre-norm connections alone, and the modules in them that may follow a norm.
PRE_NORM: dict[type[nn.Module], tuple[tuple[str, ...], ...]] = {
    vision_transformer.Block: _SCALED,
}
LINEAR_FIRST = frozenset({stock.Attention, RazorAttention, stock.Mlp})
BRANCHES: dict[type[nn.Module], tuple[tuple[str, ...], ...]] = {
    vision_transformer.Block: _SCALED,
    vision_transformer.ResPostBlock: _PLAIN,
    vision_transformer_relpos.RelPosBlock: _SCALED,
    beit.Block: _PLAIN,
    eva.EvaBlock: _PLAIN,
    eva.EvaBlockPostNorm: _PLAIN,
    swin_transformer.SwinTransformerBlock: _PLAIN,
    swin_transformer_v2.SwinTransformerV2Block: _PLAIN,
}
