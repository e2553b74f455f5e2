"""How images and their masks of classes become the inputs and labels of segmentation models."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from razorctl.models import Rows
from razorctl.models.images import converted

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from torch import Tensor

IGNORED = 255  # the value of a pixel without a class
NO_CLASS = -100  # its label
MODES = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L", "I;16N")  # one channel of whole numbers
AREA = (0.25, 1.0)  # of an image, that a random crop has
JITTER = 0.4  # largest share by which brightness, contrast and saturation change


def values(mask: "Image") -> "np.ndarray[Any, Any]":
    """The values [height, width] of a mask of one of MODES, int64; of a palette, its indices."""
    import numpy as np

    return np.asarray(mask).astype(np.int64)


def labels(mask: "Image", first: int = 0) -> "np.ndarray[Any, Any]":
    """The labels [height, width] of a mask, int64: values less `first`, or NO_CLASS.

    first: the value of the first class; IGNORED and what is less have no class.
    """
    found = values(mask)
    ignored = (found == IGNORED) | (found < first)
    found -= first
    found[ignored] = NO_CLASS
    return found


def transform(config: Mapping[str, Any]) -> Callable[[Rows], Rows]:
    """A function from rows of images and masks to inputs and labels of the model's size.

    config: as in `models.images`; images are not cropped but changed in shape.
    Inputs are [channels, height, width], fp32; labels [height, width], int64, and NO_CLASS where
    a pixel has no class. Rows may have a `first`, as in `labels`, and may lack masks.
    """
    from torchvision.transforms import InterpolationMode, v2

    _, *size = config["input_size"]
    return partial(_prepared, config, v2.Resize(size, InterpolationMode(config["interpolation"])))


def augmented(config: Mapping[str, Any], augment: str) -> Callable[[Rows], Rows]:
    """As `transform`, with an image and its mask cropped at random, to AREA of it, and flipped.

    augment: as `Job.augment`; `rand` also changes brightness, contrast and saturation. All is drawn
    from the default generator of torch.
    """
    from torchvision.transforms import InterpolationMode, v2

    _, *size = config["input_size"]
    crop = v2.RandomResizedCrop(
        size, AREA, interpolation=InterpolationMode(config["interpolation"])
    )
    colors = [v2.ColorJitter(JITTER, JITTER, JITTER)] if augment == "rand" else []
    return partial(_prepared, config, v2.Compose([crop, v2.RandomHorizontalFlip(), *colors]))


def _prepared(config: Mapping[str, Any], changes: Callable[..., Any], rows: Rows) -> Rows:
    import torch
    from torchvision import tv_tensors

    mode = "L" if config["input_size"][0] == 1 else "RGB"
    images = [converted(image).convert(mode) for image in rows["image"]]
    if "mask" not in rows:
        return {"inputs": [_pixels(config, changes(image)) for image in images]}
    firsts = rows.get("first", [0] * len(images))
    both = [
        changes(image, tv_tensors.Mask(torch.from_numpy(labels(mask, first))))
        for image, mask, first in zip(images, rows["mask"], firsts, strict=True)
    ]
    return {
        "inputs": [_pixels(config, image) for image, _ in both],
        "labels": [mask.as_subclass(torch.Tensor) for _, mask in both],
    }


def _pixels(config: Mapping[str, Any], image: Any) -> "Tensor":
    import torch
    from torchvision.transforms.v2 import functional

    found = functional.to_dtype(functional.to_image(image), torch.float32, scale=True)
    normal = functional.normalize(found, list(config["mean"]), list(config["std"]))
    pixels: Tensor = normal.as_subclass(torch.Tensor)
    return pixels
