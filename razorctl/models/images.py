"""How the rows of image data sets become the inputs of any library's models.

A data config is timm's: `input_size` (channels, height, width), `mean`, `std`, `interpolation`,
`crop_pct` and `crop_mode`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from razorctl.models import Rows, prepared

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

RAND = "rand-m9-mstd0.5-inc1"  # RandAugment as in timm's recipes for ViTs


def resized(config: Mapping[str, Any], input_size: int | None) -> dict[str, Any]:
    """A data config for images `input_size` pixels high and wide; None leaves it as it is."""
    if input_size is None:
        return dict(config)
    return {**config, "input_size": (config["input_size"][0], input_size, input_size)}


def transform(config: Mapping[str, Any]) -> Callable[[Rows], Rows]:
    """A function from rows with images to rows with input tensors [channels, height, width]."""
    from timm.data import create_transform

    return partial(_prepared, create_transform(**config, is_training=False), _mode(config))


def augmented(config: Mapping[str, Any], augment: str) -> Callable[[Rows], Rows]:
    """As `transform`, with timm's changes for training: see `Job.augment`."""
    from timm.data import create_transform

    drawn = RAND if augment == "rand" else None
    train = create_transform(**config, is_training=True, color_jitter=None, auto_augment=drawn)
    return partial(_prepared, train, _mode(config))


def example(config: Mapping[str, Any], batch_size: int) -> "Tensor":
    """A batch of zero images [batch, channels, height, width]."""
    import torch

    return torch.zeros(batch_size, *config["input_size"])


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


def _mode(config: Mapping[str, Any]) -> str:
    return "L" if config["input_size"][0] == 1 else "RGB"


def _prepared(prepare: Callable[[Any], "Tensor"], mode: str, rows: Rows) -> Rows:
    inputs = [prepare(converted(image).convert(mode)) for image in rows["image"]]
    return prepared(inputs, rows)
