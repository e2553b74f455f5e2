"""Vision models built by timm, and its own layers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from timm import layers as stock
from timm.data import create_transform, resolve_model_data_config
from timm.layers import activations as stock_activations
from timm.models import (
    beit,
    eva,
    swin_transformer,
    swin_transformer_v2,
    vision_transformer,
    vision_transformer_relpos,
)
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from razorctl.families import Model, Rows
from razorctl.layers import RazorLayer, activation
from razorctl.layers.attention import Attention, Diverted
from razorctl.layers.norm import Norm
from razorctl.layers.scale import LayerScale

VIT_MICRO = {
    "img_size": 28,
    "patch_size": 7,
    "in_chans": 1,
    "embed_dim": 128,
    "depth": 6,
    "num_heads": 4,
}
VIT_MICRO_WEIGHTS = Path(__file__).parent / "vit_micro" / "model.safetensors"


def vit_micro(
    num_classes: int, pretrained: bool = True, input_size: int | None = None
) -> VisionTransformer:
    """A ViT of 1.2 million parameters for 28 x 28 grey images, pretrained on Fashion-MNIST.

    The classifier is always fresh. How the weights were made stands beside them, in
    pretraining.json.
    """
    size = input_size or VIT_MICRO["img_size"]
    model = VisionTransformer(num_classes=num_classes, **{**VIT_MICRO, "img_size": size})
    model.pretrained_cfg = {
        "input_size": (1, size, size),
        "mean": (0.5,),
        "std": (0.5,),
        "interpolation": "bicubic",
        "crop_pct": 1.0,
    }
    if pretrained:
        head = {k: v for k, v in model.state_dict().items() if k.startswith("head.")}
        model.load_state_dict({**load_file(VIT_MICRO_WEIGHTS), **head})
    return model


def transform(model: nn.Module) -> Callable[[Rows], Rows]:
    """Rows of images and labels -> tensors [channels, height, width] as the model expects them."""
    config = resolve_model_data_config(model)
    prepare = create_transform(**config, is_training=False)
    mode = "L" if config["input_size"][0] == 1 else "RGB"

    def apply(rows: Rows) -> Rows:
        inputs = [prepare(image.convert(mode)) for image in rows["image"]]
        return {"inputs": inputs, "labels": rows["label"]}

    return apply


def logits(model: nn.Module, inputs: Tensor) -> Tensor:
    output: Tensor = model(inputs)
    return output


def example(model: nn.Module, batch_size: int, input_size: int | None = None) -> Tensor:
    channels, *sides = resolve_model_data_config(model)["input_size"]
    return torch.rand(batch_size, channels, *(input_size or side for side in sides))


MODELS = (
    Model(
        "vit-micro",
        "ViT of 1.2 M parameters, 28 x 28 grey, pretrained on Fashion-MNIST; built in",
        vit_micro,
        transform,
        logits,
        {"batch_size": 64, "steps": 300, "learning_rate": 0.2},
        bare=lambda classes, size: vit_micro(classes, pretrained=False, input_size=size),
        example=example,
    ),
)


class TimmAttention(Attention):
    """Base of attentions that project to q, k, v and call fused attention if `fused_attn`."""

    @property
    def fused_attn(self) -> bool:
        """The stock setting where nothing is saved, else what the backend needs."""
        setting: bool = vars(self)["fused_attn"]
        if not self.saving:
            return setting
        return self.backend != "stored" or self.rule is not None

    @fused_attn.setter
    def fused_attn(self, setting: bool) -> None:
        vars(self)["fused_attn"] = setting

    @classmethod
    def head_width(cls, module: nn.Module) -> int:
        width: int = module.head_dim  # type: ignore[assignment]
        return width

    @classmethod
    def columns(cls, module: nn.Module) -> int:
        return cls.head_width(module)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if not self.saving or self.rule is None:
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        with Diverted(self):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]


class RazorAttention(TimmAttention, stock.Attention):  # type: ignore[misc]
    """timm's attention of a ViT."""


class RazorAttentionRope(TimmAttention, stock.AttentionRope):  # type: ignore[misc]
    """timm's attention with rotary positions."""


class RazorLayerNorm(Norm, stock.LayerNorm):  # type: ignore[misc]
    """timm's LayerNorm."""


class RazorLayerNormFp32(Norm, stock.LayerNormFp32):  # type: ignore[misc]
    """timm's LayerNorm in single precision."""


class RazorRmsNorm(Norm, stock.RmsNorm):  # type: ignore[misc]
    """timm's RMSNorm."""

    centres = False


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


# Drop path needs none: its stock form saves one number per example.
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
    )
}

_PLAIN = (("norm1", "attn", "drop_path1"), ("norm2", "mlp", "drop_path2"))
_SCALED = (("norm1", "attn", "ls1", "drop_path1"), ("norm2", "mlp", "ls2", "drop_path2"))
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
