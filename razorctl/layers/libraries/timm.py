"""timm's own layers, and the residual branches of its blocks."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from timm import layers as stock
from timm.layers import activations as stock_activations
from timm.layers import norm_act
from timm.layers.padding import pad_same
from timm.models import (
    beit,
    cait,
    convnext,
    efficientnet,
    eva,
    swin_transformer,
    swin_transformer_v2,
    vision_transformer,
    vision_transformer_relpos,
)
from torch import Tensor, nn

from razorctl.layers.attention.timm import EvaAttention, TimmAttention
from razorctl.layers.base import Swaps
from razorctl.layers.kinds.activation import GELU, QuickGELU, SiLU, TanhGELU
from razorctl.layers.kinds.batch_norm import BatchNorm
from razorctl.layers.kinds.channel_gate import Excitation, Gate
from razorctl.layers.kinds.channel_norm import WithActivation
from razorctl.layers.kinds.conv import Conv2d
from razorctl.layers.kinds.dropout import DropPath
from razorctl.layers.kinds.group_norm import GroupNorm
from razorctl.layers.kinds.layer_scale import LayerScale, ScaledBlock
from razorctl.layers.kinds.norm import Norm
from razorctl.layers.kinds.residual_sum import Adding
from razorctl.rules.base import Rule

Layer = Callable[[Tensor], Tensor]


class TimmLayerNorm(Norm):
    """timm's LayerNorm."""

    @property
    def plain(self) -> bool:  # type: ignore[override]
        """False if timm's setting may call APEX."""
        return not self._fast_norm


class BatchNormAct(WithActivation, BatchNorm):
    """timm's BatchNorm with an activation function."""


class GroupNormAct(WithActivation, GroupNorm):
    """timm's GroupNorm with an activation function."""


class Conv2dSame(Conv2d):
    """timm's convolution with TensorFlow's padding, which depends on the input's size."""

    def sparse(self, input: Tensor) -> Tensor:
        return super().sparse(pad_same(input, self.kernel_size, self.stride, self.dilation))


class StandardizedConv2d(Conv2d):
    """timm's convolutions with a standardized weight, which a gain may scale.

    Gradients of the weight and of the gain both need the copy of the input.
    """

    eps: float
    scale: float  # only with a parameter `gain`
    same_pad: bool = False

    def forward(self, input: Tensor) -> Tensor:
        gain = getattr(self, "gain", self.weight)
        if gain.requires_grad and not self.weight.requires_grad:
            return self.stock(input)
        return super().forward(input)

    def sparse(self, input: Tensor) -> Tensor:
        sizes = self.kernel_size, self.stride, self.dilation
        return super().sparse(pad_same(input, *sizes) if self.same_pad else input)

    def convolved(self, weight: Tensor) -> Tensor:
        gain, rows = getattr(self, "gain", None), weight.reshape(1, len(weight), -1)
        if gain is not None:
            gain = ((gain if weight.requires_grad else gain.detach()) * self.scale).view(-1)
        y = F.batch_norm(rows, None, None, gain, training=True, momentum=0.0, eps=self.eps)
        return y.reshape_as(weight)


def _squeezed(x: Tensor, add_maxpool: bool = False) -> Tensor:
    """The mean of each channel; add_maxpool: averaged with its maximum."""
    mean = x.mean((2, 3), keepdim=True)
    return 0.5 * mean + 0.5 * x.amax((2, 3), keepdim=True) if add_maxpool else mean


class SEModule(Excitation):
    """timm's squeeze-and-excitation."""

    fc1: Layer
    bn: Layer
    act: Layer
    fc2: Layer
    gate: Layer
    add_maxpool: bool

    def gate_of(self, x: Tensor) -> Tensor:
        hidden = self.act(self.bn(self.fc1(_squeezed(x, self.add_maxpool))))
        return self.gate(self.fc2(hidden))


class EffectiveSEModule(Excitation):
    """timm's squeeze-and-excitation with a single layer."""

    fc: Layer
    gate: Layer
    add_maxpool: bool

    def gate_of(self, x: Tensor) -> Tensor:
        return self.gate(self.fc(_squeezed(x, self.add_maxpool)))


class SqueezeExcite(Excitation):
    """timm's squeeze-and-excitation of EfficientNet and MobileNet."""

    conv_reduce: Layer
    act1: Layer
    conv_expand: Layer
    gate: Layer

    def gate_of(self, x: Tensor) -> Tensor:
        return self.gate(self.conv_expand(self.act1(self.conv_reduce(_squeezed(x)))))


class ConvNeXtBlock(Gate):
    """timm's block of ConvNeXt, which applies its layer scale itself."""

    conv_dw: Layer
    norm: Layer
    mlp: Layer
    drop_path: Layer
    shortcut: Layer
    gamma: Tensor | None
    use_conv_mlp: bool

    def forward(self, x: Tensor) -> Tensor:
        if not self.saving or self.gamma is None:
            return self.stock(x)
        y = self.conv_dw(x)
        y = y if self.use_conv_mlp else y.permute(0, 2, 3, 1)
        y = self.mlp(self.norm(y))
        y = y if self.use_conv_mlp else y.permute(0, 3, 1, 2)
        y = self.gated(y, self.gamma.reshape(1, -1, 1, 1))
        return self.drop_path(y) + self.shortcut(x)


class ImageLayerScale(Gate):
    """timm's layer scale of images."""

    gamma: Tensor

    @classmethod
    def fits(cls, module: nn.Module, rule: Rule) -> bool:
        return super().fits(module, rule) and not module.inplace

    def forward(self, x: Tensor) -> Tensor:
        if not self.saving or x.dim() != 4:
            return self.stock(x)
        return self.gated(x, self.gamma.view(1, -1, 1, 1))


class NormedBranches(Adding):
    """timm's blocks that normalize a branch: x = x + norm1(attn(x)), then x + norm2(mlp(x))."""

    attn: Any
    mlp: Any
    norm1: Any
    norm2: Any
    drop_path1: Any
    drop_path2: Any

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or not self.saving:
            return self.stock(x, *args, **kwargs)
        x = self.added(x, self.drop_path1(self.norm1(self.attn(x, **kwargs))))
        y: Tensor = x + self.drop_path2(self.norm2(self.mlp(x)))
        return y


class CaitBlock(ScaledBlock):
    """timm's block of CaiT."""

    drops = ("drop_path", "drop_path")


SWAPS: Swaps = {
    stock.Attention: TimmAttention,
    stock.AttentionRope: TimmAttention,
    beit.Attention: TimmAttention,
    eva.EvaAttention: EvaAttention,
    vision_transformer.ParallelScalingBlock: TimmAttention,
    vision_transformer.ResPostBlock: NormedBranches,
    eva.EvaBlockPostNorm: NormedBranches,
    stock.LayerNorm: TimmLayerNorm,
    stock.BatchNormAct2d: BatchNormAct,
    stock.GroupNorm: GroupNorm,
    stock.GroupNorm1: GroupNorm,
    stock.GroupNormAct: GroupNormAct,
    norm_act.GroupNorm1Act: GroupNormAct,
    stock.Conv2dSame: Conv2dSame,
    stock.StdConv2d: StandardizedConv2d,
    stock.StdConv2dSame: StandardizedConv2d,
    stock.ScaledStdConv2d: StandardizedConv2d,
    stock.ScaledStdConv2dSame: StandardizedConv2d,
    stock.SEModule: SEModule,
    stock.EffectiveSEModule: EffectiveSEModule,
    efficientnet.SqueezeExcite: SqueezeExcite,
    convnext.ConvNeXtBlock: ConvNeXtBlock,
    stock.LayerScale: LayerScale,
    stock.LayerScale2d: ImageLayerScale,
    stock.DropPath: DropPath,
    beit.Block: ScaledBlock,
    cait.LayerScaleBlock: CaitBlock,
    eva.EvaBlock: ScaledBlock,
    stock_activations.GELU: GELU,
    stock_activations.GELUTanh: TanhGELU,
    stock_activations.QuickGELU: QuickGELU,
    stock_activations.Swish: SiLU,
}

_PLAIN = (("norm1", "attn", "drop_path1"), ("norm2", "mlp", "drop_path2"))
_SCALED = (("norm1", "attn", "ls1", "drop_path1"), ("norm2", "mlp", "ls2", "drop_path2"))
# See `by_type`.
PRE_NORM: dict[type[nn.Module], tuple[tuple[str, ...], ...]] = {vision_transformer.Block: _SCALED}
LINEAR_FIRST = frozenset({stock.Attention, stock.Mlp})
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
