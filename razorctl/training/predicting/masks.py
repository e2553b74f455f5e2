"""The masks of a segmentation model, as PNG files of each image's size."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.config import mask_classes
from razorctl.data.own.labels import NAMES
from razorctl.errors import UsageError
from razorctl.models import Rows
from razorctl.step import autocast
from razorctl.system import atomic
from razorctl.training.predicting.inference import RowOfFile, check_finite

if TYPE_CHECKING:
    from razorctl.data.own.whole import UnlabeledRows
    from razorctl.training.predicting.inference import Trained

ROOM = 256 << 20  # most bytes of logits that are resized at once
BYTE = 256  # values of a pixel of 8 bits


@dataclass(frozen=True)
class Mask(RowOfFile):
    """The path of a mask; label: the most frequent class; share: of the pixels that have it."""

    mask: str
    label: str
    share: float


def places(parts: Sequence["UnlabeledRows"], what: str = "masks") -> list[Path]:
    """The path of each row's mask in its folder; raises UsageError if two rows have the same."""
    sources: dict[Path, str] = {}
    for part in parts:
        for name, (file, row) in zip(part.names, part.places, strict=True):
            source = file if row is None else f"row {row} of {file}"
            path = name.with_name(f"{name.name}.png")
            if path in sources:
                raise UsageError(
                    f"the {what} of {sources[path]} and of {source} would both be {path}; name the "
                    "folder above them, or predict them one by one."
                )
            sources[path] = source
    return [*sources]


def write_masks(
    trained: "Trained",
    parts: Sequence["UnlabeledRows"],
    out: Path,
    done: Callable[[int], None] = lambda _: None,
) -> list[Mask]:
    """Writes the mask of each row of files, and the names of the classes, into a new folder.

    The value of a pixel is the number of its class; a PNG shows it in the color of the run, if it
    has colors. Raises UsageError, and leaves no folder, if the folder exists or cannot be written,
    and for two masks of one name. done: called with the number of masks so far.
    """
    names = iter(places(parts))
    colors = palette(trained.job.mask_colors)
    masks: list[Mask] = []
    with atomic.atomic_folder(out) as folder:
        (folder / NAMES).write_text("\n".join(trained.classes) + "\n", "utf-8")
        for part in parts:
            for place, mask in zip(part.places, _masks(trained, part), strict=True):
                name = next(names)
                _save(mask, len(trained.classes), folder / name, colors)
                counts = mask.flatten().bincount()
                label = trained.classes[int(counts.argmax())]
                share = int(counts.max()) / mask.numel()
                masks.append(Mask(*place, str(out / name), label, share))
                done(len(masks))
    return masks


@torch.no_grad()
def _masks(trained: "Trained", part: "UnlabeledRows") -> Iterator[Tensor]:
    """The number of the class of each pixel [height, width] of each image, on the CPU."""
    places = part.places
    with trained.in_memory():
        for batch in trained.batches(part.data, partial(sized, trained.transform)):
            with autocast(trained.device, trained.job):
                logits = trained.family.logits(trained.model, batch["inputs"])
            check_finite(logits, [*islice(places, len(logits))])
            for image_logits, size in zip(logits, batch["size"].tolist(), strict=True):
                yield _greatest(image_logits.float(), size).cpu()


def sized(transform: Callable[[Rows], Rows], rows: Rows) -> Rows:
    """Transformed rows, with the height and width of their images as `size`."""
    sizes = [torch.tensor([image.height, image.width]) for image in rows["image"]]
    return {**transform(rows), "size": sizes}


def _greatest(logits: Tensor, size: Sequence[int]) -> Tensor:
    """The class of each pixel [height, width] by logits [classes, height', width'].

    A few classes are resized at a time, since all may not fit into memory.
    """
    height, width = size
    best = logits.new_full((height, width), -torch.inf)
    classes = torch.zeros(height, width, dtype=torch.long, device=logits.device)
    few = max(1, ROOM // (best.nbytes or 1))
    for first in range(0, len(logits), few):
        part = logits[None, first : first + few]
        resized = F.interpolate(part, (height, width), mode="bilinear", align_corners=False)
        most, number = resized[0].max(0)
        classes = torch.where(most > best, number + first, classes)
        best = torch.maximum(most, best)
    return classes


def _save(mask: Tensor, classes: int, file: Path, colors: list[int]) -> None:
    """Writes a PNG: of 8 bits with a palette, or of 16 bits for more than BYTE classes."""
    import numpy as np
    from PIL import Image

    file.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(mask.numpy().astype(np.uint8 if classes <= BYTE else np.uint16))
    if classes <= BYTE:
        image.putpalette(colors)
    image.save(file)


def palette(mask_colors: str | None = None) -> list[int]:
    """Red, green and blue of each class, by `Job.mask_colors`, else by PASCAL VOC's color map.

    In that map the bits of a class, from the lowest, become the highest bits of red, green and blue
    in turn.
    """
    if mask_colors is not None:
        numbers = mask_classes.parse(mask_colors, colors=True).numbers
        first = {n: color for color, n in reversed(numbers.items()) if n is not None}
        return [byte for n in sorted(first) for byte in first[n].to_bytes(3)]
    values = []
    for number in range(BYTE):
        for color in range(3):
            bits = [number >> 3 * place + color & 1 for place in range(8)]
            values.append(sum(bit << 7 - place for place, bit in enumerate(bits)))
    return values
