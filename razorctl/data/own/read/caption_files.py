"""Images with captions in files: JSON of COCO, or a text file beside each image."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from razorctl.data.own.raw import RawRows, not_utf8
from razorctl.data.own.read import refused, texts
from razorctl.data.own.read.boxes import coco, common
from razorctl.data.own.read.column import SUFFIXES
from razorctl.data.own.read.folder import Folder
from razorctl.data.own.read.table_columns import IMAGE_TEXT
from razorctl.data.own.request import DataRequest
from razorctl.data.own.store import text_table
from razorctl.errors import DataError
from razorctl.system import documents
from razorctl.system.folders import spelled

SIGNS = (*coco.SIGNS[:2], rb'"caption"\s*:')
Row = dict[str, str | None]


def of_file(request: DataRequest, file: Path) -> RawRows | None:
    """The rows of a JSON file of COCO with captions; None for others.

    The folder of the images is found as by `boxes.of_file`. Raises as `of_folder`.
    """
    if request.embeds != "image" or not _has_captions(file):
        return None
    file = file.absolute()
    inside = file.parent.name.casefold() in coco.FOLDERS
    top = file.parent.parent if inside else file.parent
    return _documents(request, top, {file.stem: file})


def of_folder(request: DataRequest, folder: Folder) -> RawRows | None:
    """The rows of a folder with JSON files of COCO, one for each split by its name; else None.

    Raises UsageError if it is not clear which files to use, and DataError for damaged ones.
    """
    files = filter(_has_captions, folder.matches(r".*\.(?i:json)"))
    found = {file.stem: file.absolute() for file in files}
    return _documents(request, folder.top.absolute(), found) if found else None


def beside(request: DataRequest, folder: Folder) -> RawRows | None:
    """The rows of a folder with a text file of the same name beside each image; else None.

    A line of a text is a caption. Folders named like splits are splits.
    """
    pairs: dict[Path, dict[str, Path]] = {}
    for here, (_, names) in folder.inside.items():
        for file in (here / name for name in sorted(names)):
            kind = "image" if file.suffix.casefold() in SUFFIXES else file.suffix.casefold()
            if kind == "image" or (kind == ".txt" and not texts.is_about(file)):
                pairs.setdefault(file.with_suffix(""), {})[kind] = file
    if not any(len(pair) == 2 for pair in pairs.values()):
        return None
    parts = common.by_split(folder, pairs)
    used = request.splits(list(parts), single=True)
    rows = {
        split: [row for stem in parts[name] for row in _lines(folder.top, pairs[stem])]
        for split, name in used.items()
    }
    return _raw_rows(request, rows, used, "text files")


def _has_captions(file: Path) -> bool:
    return file.suffix.casefold() == ".json" and refused.has(file, SIGNS)


def _raw_rows(
    request: DataRequest, rows: Mapping[str, Sequence[Row]], names: dict[str, str], where: str
) -> RawRows:
    columns = ("image", "text", "place", "fault")
    splits = {split: text_table(of, *columns) for split, of in rows.items()}
    more: dict[str, Any] = {"class_names": IMAGE_TEXT, "task": "embedding"}
    return RawRows(request.name, splits, names, f"captions in {where}", **more)


def _lines(top: Path, pair: Mapping[str, Path]) -> Iterator[Row]:
    """The rows of an image and its file of captions, of which one may be missing."""
    image, file = pair.get("image"), pair.get(".txt")
    here = file or image
    assert here is not None
    place, fault = spelled(str(here.relative_to(top))), not_utf8(str(here))
    path = None if image is None else spelled(str(image))
    lines: list[str] = []
    with suppress(UnicodeDecodeError):
        lines = [] if file is None else file.read_text("utf-8-sig").splitlines()
    written = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if image is None:
        fault = fault or "no image of this name"
    elif file is None:
        fault = fault or "no caption, in a .txt file of this name"
    elif not written:
        fault = fault or "no caption in UTF-8"
    if fault is not None:
        written = [(0, "")]
    for number, line in written:
        row = {"image": path, "text": line, "place": place, "fault": fault}
        yield row if fault else {**row, "place": f"{place}, line {number}"}


def _documents(request: DataRequest, top: Path, files: Mapping[str, Path]) -> RawRows:
    names = request.splits(list(files), single=True)
    rows = {split: [*_annotated(top, files[name])] for split, name in names.items()}
    where = ", ".join(files[name].name for name in names.values())
    return _raw_rows(request, rows, names, f"{where} (COCO)")


def _annotated(top: Path, file: Path) -> Iterator[Row]:
    """The rows of a JSON file, with its images that have no caption."""
    try:
        document: Any = documents.parse(common.text_of(file).encode())
        images = {each["id"]: str(each["file_name"]) for each in document["images"]}
        captions = [(each["image_id"], each["caption"]) for each in document["annotations"]]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{file} cannot be read ({type(error).__name__}: {error}); write images with id and "
            "file_name, and annotations with image_id and caption."
        ) from None
    bases = coco.folders_of(top, file, [*images.values()])
    none = [(image, None) for image in images.keys() - {image for image, _ in captions}]
    for number, (image, caption) in enumerate([*captions, *sorted(none, key=str)]):
        place, path, fault = f"{file.name}, annotation {number}", None, None
        if image in images:
            of, fault = coco.image_at(bases, images[image])
            path = spelled(str(of))
        else:
            fault = f"of image {image}, which is not in the file"
        if number >= len(captions):
            place, fault = f"{file.name}, {spelled(images[image])}", fault or "no caption"
        elif not isinstance(caption, str):
            caption, fault = None, fault or "its caption is not text"
        yield {"image": path, "text": caption, "place": place, "fault": fault}
