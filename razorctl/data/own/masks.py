"""Images with masks of their classes: folders of them, the names of classes, what is bad."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from razorctl import units
from razorctl.data.own import contents, images, rows
from razorctl.data.own.ask import Ask, role
from razorctl.data.own.folder import files_below
from razorctl.data.own.images import Said
from razorctl.data.own.labels import numbered
from razorctl.data.own.raw import NEVER_SKIPPED, NOT_UTF8, Faults, Raw, refuse
from razorctl.data.own.store import packed
from razorctl.errors import DataError
from razorctl.folders import spelled
from razorctl.models import masks

IMAGES = ("images", "image", "img", "jpegimages")  # of several folders the first counts
MASKS = ("masks", "mask", "segmentationclass", "annotations", "annotation", "labels", "label")
NAMES, NUMBERED = "classes.txt", "id2label.json"
MOST = 1000  # classes of masks without names; more are no classes but numbers of objects, say
Parts = Mapping[str, tuple[Path, Path]]  # split as the folder calls it -> its images and its masks


def layout(folder: Path) -> Parts | None:
    """The folders of images and of masks in a folder, of each split; None if there are none.

    Folders `images` and `masks` are in the folder or in that of each split, or have folders of
    splits inside. Without splits the name of the split is that of the folder.
    """
    both = _both(folder)
    if both is not None:
        inside = [{part.name for part in where.iterdir() if part.is_dir()} for where in both]
        splits = sorted(part for part in inside[0] & inside[1] if role(part))
        if splits:
            return {split: (both[0] / split, both[1] / split) for split in splits}
        return {folder.resolve().name: both}
    parts = sorted(part for part in folder.iterdir() if part.is_dir())
    found = {part.name: pair for part in parts if (pair := _both(part)) is not None}
    return found or None


def _both(folder: Path) -> tuple[Path, Path] | None:
    inside = {part.name.casefold(): part for part in folder.iterdir() if part.is_dir()}
    pair = [next((inside[n] for n in of if n in inside), None) for of in (IMAGES, MASKS)]
    return (pair[0], pair[1]) if pair[0] is not None and pair[1] is not None else None


def read(ask: Ask, folder: Path, parts: Parts) -> Raw:
    """The images and masks of a folder, which are pairs if they are named alike but for the ending.

    The names of the classes are in it, or else among the training masks.
    Raises UsageError if it is not clear which splits to use, and DataError if there are none.
    """
    import pyarrow as pa
    from datasets import Dataset

    whole = len(parts) == 1 and ask.split is None
    chosen = {"train": next(iter(parts))} if whole else ask.splits(list(parts))
    schema = pa.schema([(column, pa.string()) for column in ("image", "mask", "place", "fault")])
    splits = {
        split: Dataset(pa.Table.from_batches(packed(_pairs(folder, *parts[own]), schema), schema))
        for split, own in chosen.items()
    }
    told = f"masks in {parts[chosen['train']][1].relative_to(folder)}"
    return Raw(
        ask.name,
        "image",
        splits,
        chosen,
        told,
        class_names=class_names(folder) or class_names(parts[chosen["train"]][1]),
        task="segmentation",
    )


def _pairs(top: Path, of_images: Path, of_masks: Path) -> Iterator[dict[str, str | None]]:
    found: dict[Path, dict[str, list[Path]]] = {}
    for what, folder in (("image", of_images), ("mask", of_masks)):
        for file in files_below(folder, set()):
            stem = file.relative_to(folder).with_suffix("")
            found.setdefault(stem, {"image": [], "mask": []})[what].append(file)
    for stem in sorted(found):
        pair = found[stem]
        fault = next((f"two {what}s of this name" for what in pair if len(pair[what]) > 1), None)
        fault = next((f"no {what} of this name" for what in pair if not pair[what]), fault)
        image, mask = (str(files[0]) if files else None for files in pair.values())
        place = spelled(str(Path(image or mask or "").relative_to(top)))
        if any(path is not None and spelled(path) != path for path in (image, mask)):
            image, mask, fault = "", "", NOT_UTF8
        yield {"image": image, "mask": mask, "place": place, "fault": fault}


def class_names(folder: Path) -> tuple[str, ...] | None:
    """The names of the classes as a file in the folder has them; None without one.

    classes.txt has a name on each line, the first that of the value 0; id2label.json an object of
    values and names. Raises DataError if it cannot be used.
    """
    file = folder / NAMES
    if not file.exists():
        file = folder / NUMBERED
        if not file.exists():
            return None
    mend = f"give {NAMES} with a name on each line, or leave it out"
    try:
        text = file.read_text("utf-8-sig")
        if file.name == NUMBERED:
            named = {int(value): str(name) for value, name in json.loads(text).items()}
            found = [named[value] for value in range(len(named))]
        else:
            found = [line.strip() for line in text.splitlines() if line.strip()]
    except (ValueError, AttributeError, KeyError):
        raise DataError(f"{file} does not name the values from 0 on; {mend}.") from None
    if len(set(found)) < max(len(found), 2):
        raise DataError(f"{file} does not name two or more classes, each once; {mend}.")
    return tuple(found)


def named(raw: Raw) -> Raw:
    """The rows with names of their classes, which are the values of the training masks if unnamed.

    Reads these masks, but not again if `looked` follows. Raises DataError if they have no classes.
    """
    if raw.class_names is not None:
        return raw
    known = rows.faults(raw, numbered(raw)[1])
    said = looked(raw, known)
    tops = [top for fault, top, _ in said["train"].values() if not fault]
    if not tops:
        bad = faults(said, MOST)
        every = {split: {**known[split], **bad[split]} for split in bad}
        refuse(raw.name, [*raw.named(every)], skip_bad=False)
    highest = max(tops)
    if not 1 <= highest < MOST:
        has = "no class but 0" if highest < 1 else f"values up to {highest:,}"
        raise DataError(
            f"the masks of {raw.name} have {has}, besides {masks.IGNORED} for pixels to ignore; "
            "write the classes as 0, 1, 2 and so on."
        )
    return replace(raw, class_names=tuple(map(str, range(highest + 1))))


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
