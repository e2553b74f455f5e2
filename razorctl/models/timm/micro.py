"""vit-micro, a built-in model: its weights come with the package."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from razorctl.errors import UsageError
from razorctl.models.model import Size
from razorctl.models.timm.classification import TimmClassifier

if TYPE_CHECKING:
    from timm.models.vision_transformer import VisionTransformer
    from torch import nn

VIT_MICRO = {
    "img_size": 28,
    "patch_size": 7,
    "in_chans": 1,
    "embed_dim": 128,
    "depth": 6,
    "num_heads": 4,
}
NAME = "vit-micro"
ARCHITECTURE = "vit_tiny_patch16_224"  # VIT_MICRO replaces its arguments
WEIGHTS = Path(__file__).parents[1] / "vit_micro" / "model.safetensors"


def vit_micro(num_classes: int, pretrained: bool = True) -> "VisionTransformer":
    """A ViT of 1.2 million parameters for 28 x 28 gray images, pretrained on Fashion-MNIST.

    The classifier is always fresh. pretraining.json beside the weights says how they were trained.
    """
    from safetensors.torch import load_file
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(num_classes=num_classes, **VIT_MICRO)
    size = VIT_MICRO["img_size"]
    model.pretrained_cfg = {
        "architecture": ARCHITECTURE,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        "input_size": (1, size, size),
        "mean": (0.5,),
        "std": (0.5,),
        "interpolation": "bicubic",
        "crop_pct": 1.0,
    }
    if pretrained:
        head = {k: v for k, v in model.state_dict().items() if k.startswith("head.")}
        model.load_state_dict({**load_file(WEIGHTS), **head})
    return model


@dataclass(frozen=True, kw_only=True)
class Micro(TimmClassifier):
    """The model of `vit_micro`, for images of one size."""

    # Gray clothes taught it little about other images; measured on 200 drawings.
    own_defaults: ClassVar[Mapping[str, Any]] = {"times": 3, "sgd": {"learning_rate": 0.1}}

    def build(self, classes: int, input_size: Size = None, pretrained: bool = True) -> "nn.Module":
        side = VIT_MICRO["img_size"]
        if input_size not in (None, side):
            raise UsageError(
                f"{NAME} takes images of {side} x {side} pixels, not {input_size}; leave the input "
                "size out."
            )
        model: nn.Module = vit_micro(classes, pretrained)
        return model

    def files(self, weights: bool) -> Sequence[Path]:
        return ()


MICRO = Micro(
    name=NAME,
    summary="ViT of 1.2 M parameters, 28 x 28 gray, pretrained on Fashion-MNIST; built in",
    task="classification",
    defaults={
        "batch_size": 64,
        "steps": 300,
        "sgd": {"learning_rate": 0.2},
        "adamw": {"learning_rate": 3e-3, "weight_decay": 0.05},
    },
    timm_name=ARCHITECTURE,
    args=VIT_MICRO,
)
