"""Images and their masks of classes as a segmentation model takes them."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from razorctl.models import Rows
from razorctl.models.timm import converted

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from torch import Tensor

IGNORED = 255  # the value of a pixel without a class
NO_CLASS = -100  # its label
MODES = ("1", "L", "P", "I", "I;16", "I;16B", "I;16L", "I;16N")  # one channel of whole numbers
AREA = (0.25, 1.0)  # of an image, that a random crop has


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


def segmented(config: Mapping[str, Any], train: bool = False) -> Callable[[Rows], Rows]:
    """A function from rows of images and masks to inputs and labels.

    config: as timm's data configs: `input_size` (channels, height, width), `mean`, `std` and
        `interpolation`, a name such as `bicubic`.
    train: whether images and masks are cropped at random, to AREA of them, and flipped, together;
        drawn from the default generator of torch.
    Inputs are [channels, height, width], fp32; labels [height, width], int64, and NO_CLASS where
    a pixel has no class. Rows may have a `first`, as in `labels`, and may lack masks.
    """
    import torch
    from torchvision import tv_tensors
    from torchvision.transforms import InterpolationMode, v2
    from torchvision.transforms.v2 import functional

    channels, *size = config["input_size"]
    mode = InterpolationMode(config["interpolation"])
    changes: Callable[..., Any] = v2.Resize(size, mode)
    if train:
        crop = v2.RandomResizedCrop(size, AREA, interpolation=mode)
        changes = v2.Compose([crop, v2.RandomHorizontalFlip()])

    def pixels(image: Any) -> "Tensor":
        found = functional.to_dtype(functional.to_image(image), torch.float32, scale=True)
        normal: Tensor = functional.normalize(found, list(config["mean"]), list(config["std"]))
        return normal.as_subclass(torch.Tensor)  # type: ignore[arg-type]

    def prepared(rows: Rows) -> Rows:
        images = [converted(i).convert("L" if channels == 1 else "RGB") for i in rows["image"]]
        if "mask" not in rows:
            return {"inputs": [pixels(changes(image)) for image in images]}
        firsts = rows.get("first", [0] * len(images))
        masks = [
            tv_tensors.Mask(torch.from_numpy(labels(mask, first)))
            for mask, first in zip(rows["mask"], firsts, strict=True)
        ]
        both = [changes(image, mask) for image, mask in zip(images, masks, strict=True)]
        return {
            "inputs": [pixels(image) for image, _ in both],
            "labels": [mask.as_subclass(torch.Tensor) for _, mask in both],
        }

    return prepared
