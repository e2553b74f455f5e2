"""Vision models built by timm."""

from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file
from timm.data import create_transform, resolve_model_data_config
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from razorctl.families import Model, Rows

VIT_MICRO = {
    "img_size": 28,
    "patch_size": 7,
    "in_chans": 1,
    "embed_dim": 128,
    "depth": 6,
    "num_heads": 4,
}
VIT_MICRO_WEIGHTS = Path(__file__).parent / "vit_micro" / "model.safetensors"


def vit_micro(num_classes: int, pretrained: bool = True) -> VisionTransformer:
    """A ViT of 1.2 million parameters for 28 x 28 grey images, pretrained on Fashion-MNIST.

    The classifier is always fresh. How the weights were made stands beside them, in
    pretraining.json.
    """
    model = VisionTransformer(num_classes=num_classes, **VIT_MICRO)
    size = VIT_MICRO["img_size"]
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


MODELS = (
    Model(
        "vit-micro",
        "ViT of 1.2 M parameters, 28 x 28 grey, pretrained on Fashion-MNIST; built in",
        vit_micro,
        transform,
        logits,
        {"batch_size": 64, "steps": 300, "learning_rate": 0.2},
    ),
)
