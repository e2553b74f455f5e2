"""Image folders: a folder for each class, directly or inside a folder for each split."""

import os
from collections.abc import Iterator
from pathlib import Path

from razorctl.data.own.ask import Ask, role
from razorctl.data.own.columns import SUFFIXES
from razorctl.data.own.raw import NOT_UTF8, Fault, Raw
from razorctl.data.own.store import packed
from razorctl.errors import DataError
from razorctl.folders import spelled

ARCHIVES = frozenset({".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".zst"})


def read(ask: Ask, folder: Path) -> Raw:
    """The images of a folder; a class is called as its folder, and may have folders inside.

    Files that are no images by their names are left out, but an archive is bad. Raises UsageError
    if it is not clear which splits to use, and DataError if there are no class folders.
    """
    import pyarrow as pa
    from datasets import Dataset

    chosen = _splits(ask, folder)
    schema = pa.schema([(column, pa.string()) for column in ("image", "label", "place", "fault")])
    nowhere: list[Fault] = []
    others: set[str] = set()
    splits = {}
    for split, own in chosen.items():
        rows = _images(folder, folder / own, nowhere, others)
        splits[split] = Dataset(pa.Table.from_batches(packed(rows, schema), schema))
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
