"""Masks of images: the classes in them, and those that cannot be used."""

from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from razorctl import units
from razorctl.data.own import contents, images
from razorctl.data.own.images import Said
from razorctl.data.own.raw import NEVER_SKIPPED, Faults, Raw
from razorctl.models import masks


def faults(said: Said, classes: int) -> dict[str, dict[int, str]]:
    """The rows whose masks cannot be used, of what `looked` returns."""
    found: dict[str, dict[int, str]] = {}
    for split, seen in said.items():
        found[split] = {}
        for row, (fault, highest, _) in seen.items():
            if fault or highest >= classes:
                beyond = (
                    f"mask: the value {highest}, beyond those of {units.count(classes, 'class')}"
                )
                found[split][row] = fault or beyond
    return found


def looked(raw: Raw, known: Faults, progress: Any = lambda _: None) -> Said:
    """What is wrong with each mask, or "", with the highest of its classes and its content.

    Rows in `known` are not looked at.
    """
    look = partial(_look, raw.root)
    return images.seen(raw, known, progress, ("image", "mask"), look, tuple[str, int, int])


def _look(root: Path | None, image: Any, mask: Any) -> tuple[str, int, int]:
    highest = -1

    def see(opened: Any) -> str | None:
        nonlocal highest
        if opened.format == "JPEG":
            return "a JPEG, which changes values: save it as PNG"
        if opened.mode not in masks.MODES:
            return f"of mode {opened.mode}: save one channel whose values are classes, as PNG"
        other = None if images.unreachable(root, image) else _size(image)
        if other not in (None, opened.size):
            sizes = (f"{width} x {height}" for width, height in (opened.size, other))
            return " pixels, and its image ".join(sizes)
        found = masks.values(opened)
        classes = found[found != masks.IGNORED]
        if not len(classes):
            return f"no pixel of a class, only {masks.IGNORED}"
        if classes.min() < 0:
            return f"the value {classes.min()}: write classes as 0, 1, 2 and so on"
        highest = int(classes.max())
        return None

    if mask is None:
        return "no mask", highest, 0
    fault = images.fault(root, mask, see, values=True)
    if fault is not None:
        return fault if fault in NEVER_SKIPPED else f"mask: {fault}", highest, 0
    return "", highest, contents.of_image(mask)


def _size(image: Any) -> tuple[int, int] | None:
    """The width and height of an image as it is shown; None if it cannot be read."""
    import PIL.Image
    from PIL.ExifTags import Base

    try:
        with PIL.Image.open(BytesIO(image) if isinstance(image, bytes) else image) as opened:
            width, height = opened.size
            turned = opened.getexif().get(Base.Orientation) in (5, 6, 7, 8)
    except Exception:  # PIL raises many kinds, and what is wrong with images is said elsewhere
        return None
    return (height, width) if turned else (width, height)
