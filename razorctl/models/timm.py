"""Vision models built by timm."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl import hub
from razorctl.errors import UsageError
from razorctl.models import Model, Named, Rows, prepared

if TYPE_CHECKING:
    from PIL.Image import Image
    from timm.models.vision_transformer import VisionTransformer
    from torch import Tensor, nn

VIT_MICRO = {
    "img_size": 28,
    "patch_size": 7,
    "in_chans": 1,
    "embed_dim": 128,
    "depth": 6,
    "num_heads": 4,
}
RAND = "rand-m9-mstd0.5-inc1"  # RandAugment as in timm's recipes for ViTs
VIT_MICRO_WEIGHTS = Path(__file__).parent / "vit_micro" / "model.safetensors"


def vit_micro(num_classes: int, pretrained: bool = True) -> "VisionTransformer":
    """A ViT of 1.2 million parameters for 28 x 28 gray images, pretrained on Fashion-MNIST.

    The classifier is always fresh. pretraining.json beside the weights says how they were made.
    """
    from safetensors.torch import load_file
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(num_classes=num_classes, **VIT_MICRO)
    size = VIT_MICRO["img_size"]
    model.pretrained_cfg = {
        "architecture": "vit_tiny_patch16_224",  # whose arguments VIT_MICRO replaces
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
        model.load_state_dict({**load_file(VIT_MICRO_WEIGHTS), **head})
    return model


def _micro(
    classes: int, input_size: int | None = None, pretrained: bool = True
) -> "VisionTransformer":
    if input_size not in (None, VIT_MICRO["img_size"]):
        raise UsageError(
            f"vit-micro takes images of {VIT_MICRO['img_size']} x {VIT_MICRO['img_size']} pixels, "
            f"not {input_size}; leave the input size out."
        )
    return vit_micro(classes, pretrained)


def _data_config(model: "nn.Module", input_size: int | None) -> dict[str, Any]:
    """timm's data config of a model, for images `input_size` pixels high and wide."""
    from timm.data import resolve_model_data_config

    config: dict[str, Any] = resolve_model_data_config(model)
    if input_size is not None:
        config["input_size"] = (config["input_size"][0], input_size, input_size)
    return config


def transform(model: "nn.Module", input_size: int | None = None) -> Callable[[Rows], Rows]:
    """A function from rows with images to rows with input tensors [channels, height, width]."""
    from timm.data import create_transform

    config = _data_config(model, input_size)
    mode = "L" if config["input_size"][0] == 1 else "RGB"
    return partial(_prepared, create_transform(**config, is_training=False), mode)


def augmented(model: "nn.Module", input_size: int | None, augment: str) -> Callable[[Rows], Rows]:
    """As `transform`, with timm's changes for training: see `Job.augment`."""
    from timm.data import create_transform

    config = _data_config(model, input_size)
    mode = "L" if config["input_size"][0] == 1 else "RGB"
    drawn = RAND if augment == "rand" else None
    train = create_transform(**config, is_training=True, color_jitter=None, auto_augment=drawn)
    return partial(_prepared, train, mode)


def converted(image: "Image") -> "Image":
    """An image that can be converted to 8 bits as it looks: on white, and not cut off at 255.

    Integers of more bits have the range of 16, and numbers up to 1 are shares of white.
    """
    import numpy as np
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        values = np.asarray(image, np.float32)
        highest = values.max()
        white = 65535 if image.mode.startswith("I;16") or highest > 255 else 255
        white = 1 if image.mode == "F" and highest <= 1 else white
        return Image.fromarray((values.clip(0, white) * (255 / white)).round().astype(np.uint8))
    if image.has_transparency_data:
        white_page = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white_page, image.convert("RGBA"))
    return image


def _prepared(prepare: Callable[[Any], "Tensor"], mode: str, rows: Rows) -> Rows:
    inputs = [prepare(converted(image).convert(mode)) for image in rows["image"]]
    return prepared(inputs, rows)


def example(model: "nn.Module", batch_size: int, input_size: int | None = None) -> "Tensor":
    """A batch of zero images [batch, channels, height, width]."""
    import torch

    return torch.zeros(batch_size, *_data_config(model, input_size)["input_size"])


def logits(model: "nn.Module", inputs: "Tensor") -> "Tensor":
    output: Tensor = model(inputs)
    return output


def save(
    args: Mapping[str, Any],
    model: "nn.Module",
    classes: Sequence[str],
    input_size: int | None,
    folder: Path,
) -> None:
    """Writes what `timm.create_model("local-dir:FOLDER", pretrained=True)` loads.

    args: those with which timm builds the model, beside the number of classes.
    """
    from timm.models import save_for_hf

    size = {} if input_size is None or "img_size" in args else {"img_size": input_size}
    save_for_hf(
        model,
        folder,
        model_config={"label_names": list(classes)},
        model_args={**args, **size},
        safe_serialization=True,
    )


def load(folder: Path, input_size: int | None = None) -> tuple["nn.Module", Callable[[Rows], Rows]]:
    """The model and the transform that `save` wrote."""
    from timm import create_model

    model: nn.Module = create_model(f"local-dir:{folder}", pretrained=True)
    return model, transform(model, input_size)


def from_hub(
    name: str, summary: str, timm_name: str, patch: int, defaults: Mapping[str, Any]
) -> Named:
    """The name of a timm ViT with patches of `patch` pixels and weights from the hub."""

    def settings(classes: int, input_size: int | None) -> dict[str, Any]:
        if input_size is None:
            return {"num_classes": classes}
        if input_size % patch:
            raise UsageError(
                f"{name} splits images into patches of {patch} pixels, and {input_size} is not a "
                f"multiple of that; use {-(-input_size // patch) * patch}."
            )
        return {"num_classes": classes, "img_size": input_size}

    def build(classes: int, input_size: int | None = None) -> "nn.Module":
        from timm import create_model

        wanted = settings(classes, input_size)
        folder = hub.fetch(name, f"timm/{timm_name}", ("model.safetensors",), "model")
        # The hub's file has timm's layout, even if the first release of the weights had another.
        weights = {"file": str(folder / "model.safetensors"), "custom_load": False}
        with hub.reading(name, folder):
            model: nn.Module = create_model(
                timm_name, pretrained=True, pretrained_cfg_overlay=weights, **wanted
            )
        return model

    def bare(classes: int, input_size: int | None = None) -> "nn.Module":
        from timm import create_model

        model: nn.Module = create_model(timm_name, **settings(classes, input_size))
        return model

    model = Model(
        name,
        summary,
        "image",
        "classification",
        build,
        bare,
        transform,
        example,
        logits,
        partial(save, {}),
        load,
        defaults,
        augmented,
    )
    return _classifier(model)


def _classifier(model: Model) -> Named:
    return Named(model.name, model.summary, "image", ("classification",), lambda _: model)


# SGD as in Sheared Backpropagation, section 5.1, which has no AdamW; its values are usual ones.
VIT_DEFAULTS = {
    "batch_size": 128,
    "steps": 20_000,
    "evaluate_every": 1000,
    "augment": "crop",
    "sgd": {"learning_rate": 0.01},
    "adamw": {"learning_rate": 1e-4, "weight_decay": 0.05},
}
MODELS = (
    _classifier(
        Model(
            "vit-micro",
            "ViT of 1.2 M parameters, 28 x 28 gray, pretrained on Fashion-MNIST; built in",
            "image",
            "classification",
            _micro,
            partial(_micro, pretrained=False),
            transform,
            example,
            logits,
            partial(save, VIT_MICRO),
            load,
            {
                "batch_size": 64,
                "steps": 300,
                "sgd": {"learning_rate": 0.2},
                "adamw": {"learning_rate": 3e-3, "weight_decay": 0.05},
            },
            augmented,
        )
    ),
    from_hub(
        "vit-b16",
        "ViT-B/16, 224 px, pretrained on ImageNet-21k; from the hub",
        "vit_base_patch16_224.augreg_in21k",
        16,
        VIT_DEFAULTS,
    ),
    from_hub(
        "vit-l16",
        "ViT-L/16, 224 px, pretrained on ImageNet-21k; from the hub",
        "vit_large_patch16_224.augreg_in21k",
        16,
        {**VIT_DEFAULTS, "adamw": {"learning_rate": 5e-5, "weight_decay": 0.05}},
    ),
)
