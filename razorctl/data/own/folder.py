"""Image folders: a folder for each class, or one of images and one of masks; also of each split."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from razorctl.data.own.ask import Ask, role
from razorctl.data.own.columns import SUFFIXES
from razorctl.data.own.raw import NOT_UTF8, Fault, Raw
from razorctl.data.own.store import table
from razorctl.errors import DataError
from razorctl.folders import spelled

IMAGES = ("images", "image", "img", "jpegimages")  # of several folders the first counts
MASKS = ("masks", "mask", "segmentationclass", "annotations", "annotation", "labels", "label")
NAMES, NUMBERED = "classes.txt", "id2label.json"
Parts = Mapping[str, tuple[Path, Path]]  # split as the folder calls it -> its images and its masks
ARCHIVES = frozenset({".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".zst"})


def read(ask: Ask, folder: Path) -> Raw:
    """The images of a folder; a class is called as its folder, and may have folders inside.

    Files that are no images by their names are left out, but an archive is bad. Raises UsageError
    if it is not clear which splits to use, and DataError if there are no class folders.
    """
    chosen = _splits(ask, folder)
    nowhere: list[Fault] = []
    others: set[str] = set()
    splits = {}
    for split, own in chosen.items():
        rows = _images(folder, folder / own, nowhere, others)
        splits[split] = table(rows, "image", "label", "place", "fault")
    if not any(map(len, splits.values())) and not nowhere:
        raise DataError(
            f"{ask.name} has no folders with images; give a folder for each class, or a table."
        )
    told = "a folder for each class"
    if others:
        told += f", without its {', '.join(sorted(others))}"
    called = {split: folder.resolve().name if own == "." else own for split, own in chosen.items()}
    return Raw(ask.name, "image", splits, called, told, nowhere=tuple(nowhere))


def _splits(ask: Ask, folder: Path) -> dict[str, str]:
    """Split -> its folder, which is the whole folder if there are no splits."""
    folders = _folders(folder)
    # A folder called train with images in it is a class.
    parts = [part.name for part in folders if role(part.name) and _folders(part)]
    if ask.split is not None:
        parts = [part.name for part in folders]
    elif "train" not in map(role, parts):
        return {"train": "."}
    return ask.splits(parts)


def _folders(folder: Path) -> list[Path]:
    found = (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(path for path in found if path.is_dir())


def _images(
    top: Path, folder: Path, nowhere: list[Fault], others: set[str]
) -> Iterator[dict[str, str | None]]:
    """The rows of a split.

    nowhere: gets the class folders without images. others: gets the endings of files that are
    left out.
    """
    for label in _folders(folder):
        empty = True
        for file in files_below(label, others):
            empty = False
            yield _row(top, file, label.name)
        if empty:
            nowhere.append(
                Fault(spelled(str(label.relative_to(top))), "a class folder without images")
            )
    loose = (path for path in folder.iterdir() if path.is_file() and _counts(path, others))
    yield from (_row(top, file, None) for file in sorted(loose))


def _row(top: Path, file: Path, label: str | None) -> dict[str, str | None]:
    fault = None if label else "in no class folder"
    if file.suffix.casefold() in ARCHIVES:
        fault = "an archive: unpack it"
    place = spelled(str(file.relative_to(top)))
    image = str(file)
    if spelled(image) != image:
        image, fault = "", NOT_UTF8
    label = None if label is None else spelled(label)
    return {"image": image, "label": label, "place": place, "fault": fault}


def files_below(folder: Path, others: set[str]) -> Iterator[Path]:
    """The images and archives below a folder, in order; `others` as in `_images`."""
    for here, inside, files in os.walk(folder):
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        others.update("links to folders" for name in inside if Path(here, name).is_symlink())
        yield from (path for name in sorted(files) if _counts(path := Path(here, name), others))


def _counts(file: Path, others: set[str]) -> bool:
    """Whether a file is an image by its name, or may be one, or is an archive."""
    ending = file.suffix.casefold()
    if file.name.startswith(".") or file.name in ("Thumbs.db", "desktop.ini"):
        return False
    if ending in SUFFIXES or ending in ARCHIVES or not ending:
        return True
    others.add(f"*{spelled(ending)}")
    return False


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


def masked(ask: Ask, folder: Path, parts: Parts) -> Raw:
    """The images and masks of a folder, which are pairs if they are named alike but for the ending.

    The names of the classes are in it, or else among the training masks.
    Raises UsageError if it is not clear which splits to use, and DataError if there are none.
    """
    whole = len(parts) == 1 and ask.split is None
    chosen = {"train": next(iter(parts))} if whole else ask.splits(list(parts))
    splits = {
        split: table(_pairs(folder, *parts[own]), "image", "mask", "place", "fault")
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
