"""Masks of images: the classes in them, and those that cannot be used."""

from functools import partial
from pathlib import Path
from typing import Any

from razorctl import units
from razorctl.data.own import contents, images
from razorctl.data.own.images import Findings
from razorctl.data.own.raw import NEVER_SKIPPED, Faults, Raw
from razorctl.errors import raise_lack
from razorctl.models import Progress, masks


def findings(raw: Raw, faults: Faults, progress: Progress = lambda _: None) -> Findings:
    """The fault of each mask, or "", with the highest of its classes and its content.

    Rows with a fault are not looked at.
    """
    look = partial(_look, raw.root)
    columns = ("image", "mask")
    return images.cached_findings(raw, faults, progress, columns, look, tuple[str, int, int])


def mask_faults(findings: Findings, classes: int) -> dict[str, dict[int, str]]:
    """The rows whose masks cannot be used, by their findings and the number of classes."""
    count = units.count(classes, "class")
    faults: dict[str, dict[int, str]] = {}
    for split, rows in findings.items():
        faults[split] = {}
        for row, (fault, highest, _) in rows.items():
            if fault:
                faults[split][row] = fault
            elif highest >= classes:
                faults[split][row] = f"mask: the value {highest}, beyond those of {count}"
    return faults


def _look(root: Path | None, image: Any, mask: Any) -> tuple[str, int, int]:
    highest = -1

    def see(opened: Any) -> str | None:
        nonlocal highest
        if opened.format in ("JPEG", "MPO"):
            return "a JPEG, which changes values: save it as PNG"
        if opened.mode not in masks.MODES:
            return f"of mode {opened.mode}: save one channel whose values are classes, as PNG"
        size = None if images.place_fault(root, image) else _size(image)
        if size not in (None, opened.size):
            sizes = (f"{width} x {height}" for width, height in (opened.size, size))
            return " pixels, and its image ".join(sizes)
        values = masks.values(opened)
        classes = values[values != masks.IGNORED]
        if not len(classes):
            return f"no pixel of a class, only {masks.IGNORED}"
        if classes.min() < 0:
            return f"the value {classes.min()}: write classes as 0, 1, 2 and so on"
        highest = int(classes.max())
        return None

    if mask is None:
        return "no mask", highest, 0
    fault = images.image_fault(root, mask, see, values=True)
    if fault is not None:
        return fault if fault in NEVER_SKIPPED else f"mask: {fault}", highest, 0
    return "", highest, contents.image_content(mask)


def _size(image: Any) -> tuple[int, int] | None:
    """The width and height of an image as it is shown; None if it cannot be read."""
    from PIL.ExifTags import Base

    from razorctl.data.own import decoding

    try:
        with decoding.opened(image) as opened:
            width, height = opened.size
            turned = opened.getexif().get(Base.Orientation) in (5, 6, 7, 8)
    except Exception as error:  # PIL raises many kinds, and what is wrong is said elsewhere
        raise_lack(error)
        return None
    return (height, width) if turned else (width, height)
