"""Turns images and their masks of classes into inputs and labels of segmentation models."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from razorctl.config import mask_classes
from razorctl.config.mask_classes import IGNORED
from razorctl.config.tasks import NO_LABEL
from razorctl.models.images import converted, levels
from razorctl.models.rows import Rows

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from torch import Tensor

MODES = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L", "I;16N")  # one channel of integers
COLORS = ("RGB", "RGBA")
AREA = (0.25, 1.0)  # shares of an image that a random crop covers
Part = tuple[Mapping[str, int], bool]  # the box of an image to use, and whether to flip it
JITTER = 0.4  # largest relative change of brightness, contrast and saturation


def values(mask: "Image", colors: bool = False) -> "np.ndarray[Any, Any]":
    """The values [height, width] of a mask, int64: 0xRRGGBB for `colors`.

    Without `colors`, the mask is in one of MODES; a palette gives its indices.
    """
    import numpy as np

    if not colors:
        return np.asarray(mask).astype(np.int64)
    pixels = np.asarray(mask.convert("RGB")).astype(np.int64)
    return pixels[..., 0] << 16 | pixels[..., 1] << 8 | pixels[..., 2]


def occurring(mask: "Image") -> list[int]:
    """The values in a mask, ascending; 0xRRGGBB for a mask in COLORS."""
    import numpy as np

    pixels = values(mask, mask.mode in COLORS)
    few = mask.mode not in COLORS and pixels.min() >= 0 and pixels.max() < 1 << 16
    distinct = np.bincount(pixels.ravel()).nonzero()[0] if few else np.unique(pixels)
    return [*map(int, distinct)]


def mask_labels(mask: "Image", classes: str = "") -> "np.ndarray[Any, Any]":
    """The labels [height, width] of a mask, int64: numbers of classes, or NO_LABEL.

    classes: as `mask_classes.parse` reads it; if empty, values other than IGNORED are the numbers.
    """
    import numpy as np

    if not classes:
        labels = values(mask)
        labels[labels == IGNORED] = NO_LABEL
        return labels
    of = mask_classes.parse(classes)
    of_classes = sorted(value for value, number in of.numbers.items() if number is not None)
    pixels = values(mask, of.colors)
    at = np.searchsorted(of_classes, pixels).clip(max=len(of_classes) - 1)
    numbers = np.array([of.numbers[value] for value in of_classes])
    return np.where(np.array(of_classes)[at] == pixels, numbers[at], NO_LABEL)


def transform(config: Mapping[str, Any]) -> Callable[[Rows], Rows]:
    """A function from rows of images and masks to inputs and labels of the model's size.

    config: as in `models.images`; images are resized without cropping, whatever their shape.
    Inputs are [channels, height, width], fp32; labels [height, width], int64, and NO_LABEL for
    pixels without a class. Rows may have `mask_classes`, as in `mask_labels`, and may lack masks.
    """
    return partial(_prepared, config, _whole, _same)


def augmented(config: Mapping[str, Any], augment: str) -> Callable[[Rows], Rows]:
    """A `transform` that crops an image and its mask at random, to AREA of it, and flips them.

    augment: as `Job.augment`; `rand` also changes brightness, contrast and saturation. Everything
    is drawn from torch's default generator.
    """
    from torchvision.transforms import v2

    crop = v2.RandomResizedCrop(config["input_size"][1:], AREA)
    colors = v2.ColorJitter(JITTER, JITTER, JITTER) if augment == "rand" else _same
    return partial(_prepared, config, partial(_drawn, crop), colors)


def _same(image: "Image") -> "Image":
    return image


def _whole(image: "Image") -> Part:
    return {"top": 0, "left": 0, "height": image.height, "width": image.width}, False


def _drawn(crop: Any, image: "Image") -> Part:
    import torch

    box = crop.make_params([image])
    return box, bool(torch.rand(()) < 0.5)


def _prepared(
    config: Mapping[str, Any],
    part: Callable[["Image"], Part],
    colors: Callable[[Any], Any],
    rows: Rows,
) -> Rows:
    import torch
    from torchvision.transforms import InterpolationMode

    channels, *size = config["input_size"]
    smooth, exact = InterpolationMode(config["interpolation"]), InterpolationMode.NEAREST_EXACT
    parts, batch = [], Rows(inputs=[])
    for image, level in zip(rows["image"], levels(rows), strict=True):
        plain = converted(image, level).convert("L" if channels == 1 else "RGB")
        parts.append(part(plain))
        batch["inputs"].append(_pixels(config, colors(_resized(plain, parts[-1], size, smooth))))
    if "mask" in rows:
        classes = rows.get("mask_classes", [""] * len(parts))
        batch["labels"] = [
            # Not `nearest`, which shifts by half a pixel.
            _resized(torch.from_numpy(mask_labels(mask, of))[None], box, size, exact)[0]
            for mask, of, box in zip(rows["mask"], classes, parts, strict=True)
        ]
    return batch


def _resized(image: Any, part: Part, size: list[int], mode: Any) -> Any:
    from torchvision.transforms.v2 import functional

    box, flipped = part
    resized = functional.resized_crop(image, **box, size=size, interpolation=mode)
    return functional.horizontal_flip(resized) if flipped else resized


def _pixels(config: Mapping[str, Any], image: Any) -> "Tensor":
    import torch
    from torchvision.transforms.v2 import functional

    scaled = functional.to_dtype(functional.to_image(image), torch.float32, scale=True)
    normal = functional.normalize(scaled, list(config["mean"]), list(config["std"]))
    pixels: Tensor = normal.as_subclass(torch.Tensor)  # a plain tensor, no tv_tensor
    return pixels
