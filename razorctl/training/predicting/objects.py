"""The objects that a detection model finds in images."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from razorctl.step import autocast
from razorctl.system import atomic
from razorctl.training.detections import LEAST, likeliest
from razorctl.training.predicting import masks
from razorctl.training.predicting.inference import RowOfFile, check_finite

if TYPE_CHECKING:
    from PIL.Image import Image

    from razorctl.data.own.whole import UnlabeledRows
    from razorctl.training.predicting.inference import Trained


@dataclass(frozen=True)
class FoundObject(RowOfFile):
    """An object, its score in [0, 1], and its box in pixels of the image."""

    label: str
    score: float
    left: float
    top: float
    right: float
    bottom: float


@dataclass(frozen=True)
class FoundObjects(RowOfFile):
    """The objects of an image by descending score, and its sides in pixels."""

    width: int
    height: int
    objects: tuple[FoundObject, ...]


@torch.no_grad()
def find_objects(
    trained: "Trained", parts: Sequence["UnlabeledRows"], threshold: float = LEAST
) -> Iterator[FoundObjects]:
    """The objects in each row of files, with scores of at least `threshold`."""
    for part in parts:
        places = part.places
        with trained.in_memory():
            for batch in trained.batches(part.data, partial(masks.sized, trained.transform)):
                with autocast(trained.device, trained.job):
                    guesses = trained.family.logits(trained.model, batch["inputs"])
                here = [*islice(places, len(guesses))]
                check_finite(guesses, here)
                found = likeliest(guesses, batch["inputs"]["extent"])
                sizes = batch["size"].tolist()
                for place, (height, width), each in zip(here, sizes, found, strict=True):
                    objects = objects_of(place, each, (width, height), trained.classes, threshold)
                    yield FoundObjects(*place, width, height, objects)


def objects_of(
    place: tuple[str, int | None],
    found: dict[str, Tensor],
    size: tuple[int, int],
    classes: Sequence[str],
    threshold: float,
) -> tuple[FoundObject, ...]:
    """The objects of an image; size: its width and height, which boxes do not leave."""
    sure = found["scores"] >= threshold
    limits = torch.tensor([*size, *size])
    boxes = torch.minimum(found["boxes"][sure].float().cpu().clamp(min=0), limits)
    numbers, scores = found["labels"][sure].tolist(), found["scores"][sure].tolist()
    return tuple(
        FoundObject(*place, classes[number], score, *box)
        for number, score, box in zip(numbers, scores, boxes.tolist(), strict=True)
    )


def draw_objects(
    trained: "Trained",
    parts: Sequence["UnlabeledRows"],
    out: Path,
    threshold: float = LEAST,
    done: Callable[[int], None] = lambda _: None,
) -> list[FoundObjects]:
    """Finds objects, and writes the images with their boxes into a new folder.

    Raises what `masks.write_masks` raises. done: called with the number of images so far.
    """
    names = masks.places(parts, "pictures")
    images = chain.from_iterable(_images(part) for part in parts)
    drawn = []
    with atomic.atomic_folder(out) as folder:
        rows = zip(names, images, find_objects(trained, parts, threshold), strict=True)
        for name, image, found in rows:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _drawn(image, found, trained.classes).save(folder / name)
            drawn.append(found)
            done(len(drawn))
    return drawn


def _images(part: "UnlabeledRows") -> Iterator["Image"]:
    from razorctl.models.images import converted

    return (converted(row["image"], row.get("white")).convert("RGB") for row in part.data)


def _drawn(image: "Image", found: FoundObjects, classes: Sequence[str]) -> "Image":
    """An image with its boxes, in the colors of masks; each has its label and its score."""
    from torchvision.transforms.v2 import functional as v2
    from torchvision.utils import draw_bounding_boxes

    if not found.objects:
        return image
    palette, byte = masks.palette(), masks.BYTE
    colors, labels, boxes = [], [], []
    for one in found.objects:
        first = 3 * (1 + classes.index(one.label) % (byte - 1))  # the first color is black
        colors.append(tuple(palette[first : first + 3]))
        labels.append(f"{one.label} {one.score:.2f}")
        boxes.append([one.left, one.top, one.right, one.bottom])
    width = max(1, round(min(image.size) / 200))
    pixels = draw_bounding_boxes(
        v2.pil_to_tensor(image), torch.tensor(boxes), labels, colors, width=width
    )
    drawn: Image = v2.to_pil_image(pixels)
    return drawn
