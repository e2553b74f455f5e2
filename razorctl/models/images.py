"""Turns rows of image data sets into inputs for models of any library.

A data config is timm's: `input_size` (channels, height, width), `mean`, `std`, `interpolation`,
`crop_pct` and `crop_mode`.
"""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from razorctl.models.model import prepared
from razorctl.models.rows import Rows

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

MODES = ("L", "RGB")  # PIL modes for models with one and with more channels
WIDE = ("I", "F")  # PIL modes that do not define which value is white
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
RAND = "rand-m9-mstd0.5-inc1"  # RandAugment as in timm's recipes for ViTs


def resized(config: Mapping[str, Any], input_size: int | None) -> dict[str, Any]:
    """A data config for images `input_size` pixels high and wide; None changes nothing."""
    if input_size is None:
        return dict(config)
    return {**config, "input_size": (config["input_size"][0], input_size, input_size)}


def transform(config: Mapping[str, Any]) -> Callable[[Rows], Rows]:
    """A function from rows with images to rows with input tensors [channels, height, width]."""
    from timm.data import create_transform

    return partial(_prepared, create_transform(**config, is_training=False), _mode(config))


def check(config: Mapping[str, Any]) -> None:
    """Raises an error if images cannot be prepared by a data config."""
    from PIL.Image import MAX_IMAGE_PIXELS, new

    if prod(config["input_size"]) > (MAX_IMAGE_PIXELS or sys.maxsize):
        raise ValueError(f"images of {config['input_size'][-1]:,} pixels a side are too large")
    pages = [new("RGB", (8, 8), color) for color in ("black", "white")]
    black, white = transform(config)({"image": pages})["inputs"]
    if not (white - black).isfinite().all() or white.equal(black):
        raise ValueError("black and white do not become different numbers")


def augmented(config: Mapping[str, Any], augment: str) -> Callable[[Rows], Rows]:
    """A `transform` with timm's random changes for training: see `Job.augment`."""
    from timm.data import create_transform

    drawn = RAND if augment == "rand" else None
    train = create_transform(**config, is_training=True, color_jitter=None, auto_augment=drawn)
    return partial(_prepared, train, _mode(config))


def example(config: Mapping[str, Any], batch_size: int) -> "Tensor":
    """A batch of zero images [batch, channels, height, width]."""
    import torch

    return torch.zeros(batch_size, *config["input_size"])


def white(highest: float) -> int:
    """The white value of images in the modes WIDE, given the highest of all their values.

    Up to 1, values are shares of white; up to 255, 8-bit; above, 16-bit.
    """
    return 1 if highest <= 1 else 255 if highest <= 255 else 65535


def converted(image: "Image", level: int | None = None) -> "Image":
    """An image that converts to 8 bits as it looks: on a white page, and not clipped at 255.

    level: the white value of an image in a WIDE mode; None computes it by `white` from this image
    alone. NaN becomes black.
    """
    import numpy as np
    from PIL import Image

    if image.mode.startswith(("I", "F")):
        values = np.asarray(image, np.float32)
        if image.mode not in WIDE:
            level = 65535
        elif level is None:
            level = white(values.max(initial=0, where=np.isfinite(values)))
        shown = np.nan_to_num(values, nan=0, posinf=level, neginf=0).clip(0, level)
        return Image.fromarray((shown * (255 / level)).round().astype(np.uint8))
    if image.mode == "LAB":
        return image.convert("RGB")  # alone, not to gray
    if image.has_transparency_data:
        white_page = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white_page, image.convert("RGBA"))
    return image


def _mode(config: Mapping[str, Any]) -> str:
    return MODES[config["input_size"][0] > 1]


def _prepared(prepare: Callable[[Any], "Tensor"], mode: str, rows: Rows) -> Rows:
    images = zip(rows["image"], levels(rows), strict=True)
    return prepared([prepare(converted(*each).convert(mode)) for each in images], rows)


def levels(rows: Rows) -> list[int | None]:
    """The white level of each row, as stored with its data set; None for rows without it."""
    return rows.get("white", [None] * len(rows["image"]))
