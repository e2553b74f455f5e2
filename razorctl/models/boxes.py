"""Turns images and the boxes of their objects into inputs and labels of detection models.

A data config is as in `models.images`, with three more fields. `letterbox`: whether an image keeps
its proportions, with padding at the right or the bottom; otherwise it is stretched. `mask`: whether
the model takes a mask of the padding. `most`: the most objects of an image.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from razorctl.config.tasks import NO_LABEL
from razorctl.models.images import converted, levels
from razorctl.models.rows import Rows

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

Change = Callable[[dict[str, Any]], dict[str, Any]]
# Objects of each image in a trace; denoising groups of 100 then have the most queries. With 50, a
# step of rt-detr-r18 at a batch of 4 stores 70 KiB more, of 1.6 GiB (full) or 135 MiB.
# Beyond 100 objects queries grow with them: with 300 full stores 10 % more, and razor 15 %.
DRAWN = 10
FILL = 124  # of 255, the gray around an image that is zoomed out
LEAST = 1  # pixel, of the side of a box after a random crop


def transform(config: Mapping[str, Any]) -> Callable[[Rows], Rows]:
    """A function from rows of images, boxes and classes to inputs and labels of the model's size.

    Inputs: `pixel_values` [3, size, size], fp32; `pixel_mask` [size, size], int64, 1 for the image,
    if the model takes it; `extent` [2], the width and height in pixels that shares of boxes refer
    to. Rows with boxes also have `boxes` [most, 4], centers and sizes as shares, and `crowd`
    [most], the classes of groups of objects, which are not learned. Labels [most]: classes of
    objects. Both have NO_LABEL where there is no object.

    With a mask, shares refer to the image, as the positions of the models that take it do; without,
    they refer to the whole input.
    """
    return partial(_prepared, config, _same)


def augmented(config: Mapping[str, Any], augment: str) -> Callable[[Rows], Rows]:
    """A `transform` that crops an image at random around objects, and flips it.

    augment: as `Job.augment`; `rand` also zooms out and changes colors. Everything is drawn from
    torch's default generator.
    """
    from torchvision.transforms import v2

    changes: list[Any] = [v2.RandomIoUCrop(), v2.RandomHorizontalFlip()]
    if augment == "rand":
        changes = [v2.RandomPhotometricDistort(), v2.RandomZoomOut(FILL, p=0.5), *changes]
    left = v2.SanitizeBoundingBoxes(LEAST, labels_getter=lambda row: (row["label"], row["crowd"]))
    return partial(_prepared, config, v2.Compose([*changes, left]))


def rescaled(inputs: Mapping[str, "Tensor"], side: int) -> dict[str, "Tensor"]:
    """The inputs of a batch with images `side` pixels high and wide; boxes are shares, and stay."""
    import torch.nn.functional as F

    if side == inputs["pixel_values"].shape[-1]:
        return dict(inputs)
    size = side, side
    new = {**inputs, "pixel_values": F.interpolate(inputs["pixel_values"], size, mode="bilinear")}
    if "pixel_mask" in inputs:
        mask = F.interpolate(inputs["pixel_mask"][:, None].float(), size)
        new["pixel_mask"] = mask[:, 0].to(inputs["pixel_mask"].dtype)
    return new


def _same(row: dict[str, Any]) -> dict[str, Any]:
    return row


def _prepared(config: Mapping[str, Any], change: Change, rows: Rows) -> Rows:
    batch = Rows(inputs=[])
    if "boxes" in rows:
        batch["labels"] = []
    crowds = rows.get("crowd") or [None] * len(rows["image"])
    for number, (image, level) in enumerate(zip(rows["image"], levels(rows), strict=True)):
        plain = converted(image, level).convert("RGB")
        if "boxes" not in rows:
            batch["inputs"].append(_pixels(config, plain))
            continue
        drawn = change(_row(plain, rows["boxes"][number], rows["label"][number], crowds[number]))
        inputs = _pixels(config, drawn["image"])
        labels = _objects(config, inputs, drawn)
        batch["inputs"].append(inputs)
        batch["labels"].append(labels)
    return batch


def _row(image: "Image", boxes: Any, classes: Any, crowd: Any) -> dict[str, Any]:
    """A row as torchvision's transforms take it."""
    import torch
    from torchvision.tv_tensors import BoundingBoxes

    corners = torch.tensor(boxes, dtype=torch.float32).view(-1, 4)
    return {
        "image": image,
        "boxes": BoundingBoxes(corners, format="XYXY", canvas_size=(image.height, image.width)),
        "label": torch.tensor(classes, dtype=torch.long),
        "crowd": torch.tensor(crowd or [0] * len(classes), dtype=torch.bool),
    }


def _pixels(config: Mapping[str, Any], image: "Image") -> dict[str, "Tensor"]:
    """The inputs of an image without its boxes; see `transform`."""
    import torch
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional as v2

    _, high, wide = config["input_size"]
    sides = high, wide
    extent = image.width, image.height
    if config["letterbox"]:
        scale = min(high / image.height, wide / image.width)
        sides = max(1, round(scale * image.height)), max(1, round(scale * image.width))
    smooth = InterpolationMode(config["interpolation"])
    resized = v2.resize(image, [*sides], interpolation=smooth)
    scaled = v2.to_dtype(v2.to_image(resized), torch.float32, scale=True)
    normal = v2.normalize(scaled, list(config["mean"]), list(config["std"]))
    pixels = normal.as_subclass(torch.Tensor)  # a plain tensor, no tv_tensor
    inputs = {"pixel_values": pixels}
    if sides != (high, wide):
        inputs["pixel_values"] = pixels.new_zeros(3, high, wide)
        inputs["pixel_values"][:, : sides[0], : sides[1]] = pixels
    if config["mask"]:
        inputs["pixel_mask"] = torch.zeros(high, wide, dtype=torch.long)
        inputs["pixel_mask"][: sides[0], : sides[1]] = 1
    else:
        extent = extent[0] * wide / sides[1], extent[1] * high / sides[0]
    inputs["extent"] = torch.tensor(extent, dtype=torch.float32)
    return inputs


def _objects(
    config: Mapping[str, Any], inputs: dict[str, "Tensor"], row: Mapping[str, Any]
) -> "Tensor":
    """The labels of a row; adds its boxes and groups of objects to the inputs."""
    import torch
    from torchvision.ops import box_convert

    shares = box_convert(row["boxes"].as_subclass(torch.Tensor), "xyxy", "cxcywh")
    count = min(len(shares), config["most"])
    inputs["boxes"] = torch.zeros(config["most"], 4)
    inputs["boxes"][:count] = shares[:count] / inputs["extent"].repeat(2)
    labels = torch.full((config["most"],), NO_LABEL)
    inputs["crowd"] = labels.clone()
    classes, crowd = row["label"][:count], row["crowd"][:count]
    labels[:count] = classes.masked_fill(crowd, NO_LABEL)
    inputs["crowd"][:count] = classes.masked_fill(~crowd, NO_LABEL)
    return labels
