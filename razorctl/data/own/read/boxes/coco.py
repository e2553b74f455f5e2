"""Boxes in JSON files of COCO: one for each split, with images, annotations and categories."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from razorctl.data.own import objects
from razorctl.data.own.fields import Picture, file_at
from razorctl.data.own.labels import halved
from razorctl.data.own.raw import Fault, RawRows
from razorctl.data.own.read import refused
from razorctl.data.own.read.boxes import common
from razorctl.data.own.read.folder import IMAGES, SEEN, Folder, folders_in
from razorctl.data.own.read.lines import CONSTANTS, ESCAPED
from razorctl.data.own.request import DataRequest, role, role_in
from razorctl.errors import DataError
from razorctl.system.folders import spelled

SIGNS = (rb'"images"\s*:', rb'"annotations"\s*:', rb'"(bbox|segmentation)"\s*:')
EMPTY = (SIGNS[0], rb'"annotations"\s*:\s*\[\s*\]')  # signs of a file without annotations
FOLDERS = ("annotations", "annotation", "labels", "label")  # of JSON files beside folders of images
UNREAD = ("segmentation", "keypoints")  # the largest parts of an annotation
NAMES = ("images", "annotations", "categories")
Lists = Mapping[str, Sequence[Mapping[str, Any]]]  # the entries of a file by NAMES


def rows(request: DataRequest, folder: Folder, sign: Path, single: bool) -> RawRows:
    """The rows of a folder with COCO files, or of the one file `sign` if it is `single`.

    Segmentations are not read. Raises UsageError if it is not clear which files to use, and
    DataError for a file that is no document of COCO.
    """
    files = {sign.stem: sign} if single else _files(folder)
    names = {"train": sign.stem} if single else request.splits(list(files), single=True)
    lists = {files[name]: _lists(files[name]) for name in names.values()}
    classes, notes = _classes(lists)
    nowhere: list[Fault] = []
    splits = {
        split: common.table(_rows(folder.top, files[name], lists[files[name]], classes, nowhere))
        for split, name in names.items()
    }
    places = (spelled(str(file.relative_to(folder.top))) for file in lists)
    more = {"class_names": tuple(classes.values()), "notes": notes, "nowhere": tuple(nowhere)}
    details = f"boxes in {', '.join(places)} (COCO)"
    return common.raw_rows(request, folder, splits, names, details, box_format="xywh", **more)


def _files(folder: Folder) -> dict[str, Path]:
    """Name of a split -> its file. If some files are called instances, these alone are used."""
    every = folder.matches(r".*\.(?i:json)")
    found = [file for file in every if any(refused.has(file, sign) for sign in (SIGNS, EMPTY))]
    instances = [file for file in found if "instances" in file.stem.casefold()]
    files: dict[str, Path] = {}
    for file in instances or found:
        above = [part for part in file.relative_to(folder.top).parts[:-1] if role(part)]
        name = above[-1] if above and not role_in(file.stem) else file.stem
        files[name if name not in files else str(file.relative_to(folder.top))] = file
    return files


def _lists(file: Path) -> Lists:
    """The images, annotations and categories of a file; raises DataError for others."""
    text = common.text_of(file)
    try:
        whole = json.loads(text, object_hook=_without_outlines, parse_constant=CONSTANTS.get)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON ({error}); correct it.") from None
    if ESCAPED.search(text) and (fault := halved(whole)):
        raise DataError(f"{file} has {fault}; correct it.")
    lists: dict[str, Any] = {
        name: whole.get(name) if isinstance(whole, dict) else None for name in NAMES
    }
    for name, entries in lists.items():
        if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
            raise DataError(f"{file} has no list of objects called {name}; give it one.")
    if lists["annotations"] and not any("bbox" in each for each in lists["annotations"]):
        raise DataError(f"no annotation in {file} has a bbox; name a file of boxes (instances).")
    return lists


def _without_outlines(entry: dict[str, Any]) -> dict[str, Any]:
    for name in UNREAD:
        entry.pop(name, None)
    return entry


def _id(entry: Mapping[str, Any], name: str = "id") -> str | None:
    """An id as a text, of 3.0 as of 3; None if there is none."""
    value = entry.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None


def _classes(lists: Mapping[Path, Lists]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The ids of categories, in order, with their names, and notes on those that are left out.

    Left out is a category without a box that only stands above all others, as Roboflow writes it.
    Raises DataError for an id with several names, and for a category without both.
    """
    every: dict[str, Mapping[str, Any]] = {}
    for file, of in lists.items():
        for category in of["categories"]:
            id_, name = _id(category), category.get("name")
            if id_ is None or not isinstance(name, str) or not name.strip():
                raise DataError(f"a category in {file} has no id or no name; give it both.")
            if (other := every.setdefault(id_, category)["name"]) != name:
                raise DataError(
                    f"category {id_} in {file} is {name}, and {other} elsewhere; give all files "
                    "the same categories."
                )
    numbered = all(id_.lstrip("-").isdecimal() for id_ in every)
    ids = sorted(every, key=lambda id_: (int(id_) if numbered else 0, id_))
    used = {_id(entry, "category_id") for of in lists.values() for entry in of["annotations"]}
    notes = []
    if len(ids) > 1 and ids[0] not in used:
        name = every[ids[0]]["name"]
        if {every[id_].get("supercategory") for id_ in ids[1:]} == {name}:
            notes.append(f"the category {name} has no box and stands above the others: no class.")
            ids = ids[1:]
    return {id_: every[id_]["name"] for id_ in ids}, tuple(notes)


def _rows(
    top: Path, file: Path, lists: Lists, classes: Mapping[str, str], nowhere: list[Fault]
) -> Iterator[dict[str, Any]]:
    """The rows of a file. nowhere: faults of entries that belong to no image are added to it."""
    numbers = {id_: str(number) for number, id_ in enumerate(classes)}
    place = spelled(str(file.relative_to(top)))
    annotations: dict[str | None, list[Mapping[str, Any]]] = {}
    for entry in lists["annotations"]:
        annotations.setdefault(_id(entry, "image_id"), []).append(entry)
    images, boxes = (Counter(map(_id, lists[name])) for name in NAMES[:2])
    named = [str(entry.get("file_name")) for entry in lists["images"]]
    bases = folders_of(top, file, named)
    seen: dict[Path, str] = {}
    for at, entry in enumerate(lists["images"]):
        id_, name = _id(entry), entry.get("file_name")
        if id_ is None or not isinstance(name, str):
            lack = "no id" if id_ is None else "no file_name"
            nowhere.append(Fault(f"{place}, image {id_ or f'at {at}'}", lack))
            continue
        image, fault = image_at(bases, name)
        if seen.setdefault(image, id_) != id_:
            fault = fault or f"its file is also the file of image {seen[image]}"
        if images[id_] > 1:
            fault = fault or f"two images of the id {id_}"
        found, of_boxes = [], None
        for annotation in annotations.get(id_, ()):
            try:
                found.append(_object(annotation, numbers, boxes))
            except ValueError as error:
                of_boxes = of_boxes or f"{_mark(annotation)}: {error}"
        where = str(image.relative_to(top) if image.is_relative_to(top) else image)
        size = [entry.get("width"), entry.get("height")]
        known = all(isinstance(side, int) and side > 0 for side in size)
        yield common.row(image, where, found, fault or of_boxes, size if known else None)
    for lost in annotations.keys() - images.keys():
        for entry in annotations[lost]:
            reason = "an annotation of an image that is not in the file"
            nowhere.append(Fault(f"{place}, {_mark(entry)}", reason))


def _mark(entry: Mapping[str, Any]) -> str:
    return f"annotation {_id(entry) or 'without an id'}"


def _object(
    entry: Mapping[str, Any], numbers: Mapping[str, str], ids: Mapping[str | None, int]
) -> Any:
    """The object of an annotation; raises ValueError with its fault. ids: id -> annotations."""
    category, id_ = _id(entry, "category_id"), _id(entry)
    if category is None or category not in numbers:
        raise ValueError(f"the category {category}, which is not in the file")
    if id_ is not None and ids[id_] > 1:
        raise ValueError("the id of another annotation, too")
    crowd = bool(entry.get("iscrowd"))
    return objects.listed(entry.get("bbox"), numbers[category], crowd, _mark(entry))


def folders_of(top: Path, file: Path, names: Sequence[str]) -> list[Path]:
    """The folders that names of images may be relative to, the likeliest first.

    They are the folders around the file, and folders there with names of images, of the split, or
    with a name in the file's: train2017 for instances_train2017.json.
    """
    split, stem = role_in(file.stem) or role_in(file.parent.name), file.stem.casefold()

    def below(here: Path) -> Iterator[Path]:
        yield here
        for part in folders_in(here):
            name = part.name.casefold()
            if name in IMAGES or name in stem or (split and role_in(part.name) == split):
                yield from below(part)

    around = [here for here in file.parents if here.is_relative_to(top)]
    bases = dict.fromkeys(base for here in around for base in below(here))
    first = names[:SEEN]
    hits = {base: sum(_is_file(file_at(base, name)) for name in first) for base in bases}
    return sorted(bases, key=lambda base: -hits[base])


def _is_file(path: Path) -> bool:
    return os.path.isfile(path)  # noqa: PTH113 which raises for names that are too long


def image_at(bases: Sequence[Path], name: str) -> tuple[Path, str | None]:
    """The path of an image by its name in a file, and the fault of that name."""
    path, fault = Picture("image").of_line(name, "file_name", bases[0])
    if fault is None:
        files = (file_at(base, name.strip()) for base in bases)
        path = next(filter(_is_file, files), path)
    return Path(path), fault
