"""Boxes in JSON files of COCO: one for each split, with images, annotations and categories."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from razorctl.data.own import objects
from razorctl.data.own.fields import Picture, file_at
from razorctl.data.own.raw import Fault, RawRows
from razorctl.data.own.read import refused
from razorctl.data.own.read.boxes import common
from razorctl.data.own.read.folder import IMAGES, SEEN, Folder
from razorctl.data.own.read.lines import CONSTANTS
from razorctl.data.own.request import DataRequest, role, role_in
from razorctl.errors import DataError
from razorctl.system.folders import spelled

SIGNS = (rb'"images"\s*:', rb'"annotations"\s*:', rb'"(bbox|segmentation)"\s*:')
EMPTY = (SIGNS[0], rb'"annotations"\s*:\s*\[\s*\]')  # signs of a file without annotations
FOLDERS = ("annotations", "annotation", "labels", "label")  # of JSON files beside folders of images
UNREAD = ("segmentation", "keypoints")  # the largest parts of an annotation
LISTS = ("images", "annotations", "categories")
MISSING = "an annotation of an image that is not in the file"


@dataclass
class Annotations:
    """A JSON file: its images by their ids, annotations by the ids of images, and categories.

    twice: the ids of several images, and of several annotations. nowhere: as in `RawRows`.
    """

    place: str
    images: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    annotations: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    categories: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    twice: tuple[set[str], set[str]] = (set(), set())
    nowhere: list[Fault] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path, place: str) -> "Annotations":
        """Raises DataError for a file that is no such document."""
        lists = _lists(file)
        document = cls(place)
        for number, entry in enumerate(lists["images"]):
            id_, name = _id(entry, "id"), entry.get("file_name")
            if id_ is None or not isinstance(name, str) or not name.strip():
                lack = "no id" if id_ is None else "no file_name"
                document.nowhere.append(Fault(f"{place}, image {id_ or f'at {number}'}", lack))
            else:
                document.images.append((id_, entry))
        for entry in lists["annotations"]:
            document.annotations.setdefault(_id(entry, "image_id") or "", []).append(entry)
        for entry in lists["categories"]:
            id_, name = _id(entry, "id"), entry.get("name")
            if id_ is None or not isinstance(name, str) or not name.strip():
                raise DataError(f"a category in {file} has no id or no name; give it both.")
            if document.categories.setdefault(id_, entry)["name"] != name:
                raise DataError(f"two categories in {file} have the id {id_}; change one.")
        ids = [id_ for id_, _ in document.images]
        of_boxes = [_id(entry, "id") for entry in lists["annotations"]]
        document.twice = _several(ids), _several(of_boxes)
        for image in document.annotations.keys() - {*ids}:
            for entry in document.annotations[image]:
                document.nowhere.append(Fault(f"{place}, {_mark(entry)}", MISSING))
        return document


def _lists(file: Path) -> dict[str, list[Mapping[str, Any]]]:
    """The images, annotations and categories of a file; raises DataError for others."""
    try:
        document = json.loads(
            common.text_of(file), object_hook=_without_outlines, parse_constant=CONSTANTS.get
        )
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON ({error}); correct it.") from None
    lists = {name: document.get(name) if isinstance(document, dict) else None for name in LISTS}
    for name, entries in lists.items():
        if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
            raise DataError(f"{file} has no list of objects called {name}; give it one.")
    if lists["annotations"] and not any("bbox" in each for each in lists["annotations"] or ()):
        raise DataError(f"no annotation in {file} has a bbox; name a file of boxes (instances).")
    return {name: entries or [] for name, entries in lists.items()}


def _without_outlines(entry: dict[str, Any]) -> dict[str, Any]:
    for name in UNREAD:
        entry.pop(name, None)
    return entry


def _id(entry: Mapping[str, Any], name: str) -> str | None:
    """An id as a text, of 3.0 as of 3; None if there is none."""
    value = entry.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None


def _several(ids: Sequence[str | None]) -> set[str]:
    return {id_ for id_, count in Counter(ids).items() if count > 1 and id_ is not None}


def _mark(entry: Mapping[str, Any]) -> str:
    return f"annotation {_id(entry, 'id') or 'without an id'}"


def rows(request: DataRequest, folder: Folder, sign: Path, single: bool = False) -> RawRows:
    """The rows of a folder with COCO files, or of the one file `sign` if it is `single`.

    Segmentations are not read. Raises UsageError if it is not clear which files to use, and
    DataError for a file that is no document of COCO.
    """
    files = {sign.stem: sign} if single else _files(folder)
    names = {"train": sign.stem} if single else request.splits(list(files), single=True)
    documents = {}
    for split, name in names.items():
        place = spelled(str(files[name].relative_to(folder.top)))
        documents[split] = Annotations.read(files[name], place)
    classes, notes = _classes(documents)
    splits = {}
    for split, document in documents.items():
        splits[split] = common.table(_rows(folder, files[names[split]], document, classes))
    nowhere = tuple(fault for document in documents.values() for fault in document.nowhere)
    return common.raw_rows(
        request,
        folder,
        splits,
        names,
        f"boxes in {', '.join(document.place for document in documents.values())} (COCO)",
        class_names=tuple(classes.values()),
        notes=notes,
        nowhere=nowhere,
        box_format="xywh",
    )


def _files(folder: Folder) -> dict[str, Path]:
    """Name of a split -> its file. Of several for a split, those of instances are used."""
    found = [
        file
        for file in folder.matches(r".*\.(?i:json)")
        if refused.has(file, SIGNS) or refused.has(file, EMPTY)
    ]
    instances = [file for file in found if "instances" in file.stem.casefold()]
    files = {}
    for file in instances or found:
        above = [part for part in file.relative_to(folder.top).parts[:-1] if role(part)]
        name = above[-1] if above and not role_in(file.stem) else file.stem
        files[name if name not in files else str(file.relative_to(folder.top))] = file
    return files


def _classes(documents: Mapping[str, Annotations]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The ids of categories, in order, with their names, and notes on those that are left out.

    Left out is a category without a box that only stands above all others, as Roboflow writes it.
    Raises DataError if files give an id to categories of different names.
    """
    every: dict[str, Mapping[str, Any]] = {}
    for document in documents.values():
        for id_, category in document.categories.items():
            if every.setdefault(id_, category)["name"] != category["name"]:
                raise DataError(
                    f"category {id_} in {document.place} is {category['name']}, and in another "
                    f"file {every[id_]['name']}; give all files the same categories."
                )
    numbered = all(id_.lstrip("-").isdecimal() for id_ in every)
    ids = sorted(every, key=lambda id_: (int(id_) if numbered else 0, id_))
    entries = [e for d in documents.values() for of in d.annotations.values() for e in of]
    used = {_id(entry, "category_id") for entry in entries}
    notes = []
    if len(ids) > 1 and ids[0] not in used:
        name, others = every[ids[0]]["name"], [every[id_].get("supercategory") for id_ in ids[1:]]
        if {*others} == {name}:
            notes.append(f"the category {name} has no box and stands above the others: no class.")
            ids = ids[1:]
    return {id_: str(every[id_]["name"]) for id_ in ids}, tuple(notes)


def _rows(
    folder: Folder, file: Path, document: Annotations, classes: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    numbers = {id_: str(number) for number, id_ in enumerate(classes)}
    bases = _bases(folder, file, [entry["file_name"] for _, entry in document.images])
    seen: dict[Path, str] = {}
    for id_, entry in document.images:
        image, fault = _image(bases, entry["file_name"])
        if seen.setdefault(image, id_) != id_:
            fault = fault or f"its file is also the file of image {seen[image]}"
        if id_ in document.twice[0]:
            fault = fault or f"two images of the id {id_}"
        found, fault_of_boxes = [], None
        for annotation in document.annotations.get(id_, ()):
            try:
                found.append(_object(annotation, numbers, document.twice[1]))
            except ValueError as error:
                fault_of_boxes = fault_of_boxes or f"{_mark(annotation)}: {error}"
        place = str(image.relative_to(folder.top) if image.is_relative_to(folder.top) else image)
        size = [entry.get("width"), entry.get("height")]
        known = all(isinstance(side, int) and side > 0 for side in size)
        yield common.row(image, place, found, fault or fault_of_boxes, size if known else None)


def _object(entry: Mapping[str, Any], numbers: Mapping[str, str], twice: set[str]) -> Any:
    """The object of an annotation; raises ValueError with its fault."""
    category = _id(entry, "category_id")
    if category is None or category not in numbers:
        raise ValueError(f"the category {category}, which is not in the file")
    if _id(entry, "id") in twice:
        raise ValueError("the id of another annotation, too")
    crowd = bool(entry.get("iscrowd"))
    return objects.listed(entry.get("bbox"), numbers[category], crowd, _mark(entry))


def _bases(folder: Folder, file: Path, names: Sequence[str]) -> list[Path]:
    """The folders that names of images may be relative to, the likeliest first.

    They are the folder of the file, the one around it, and folders there with names of images, of
    the split, or with a name in the file's: train2017 for instances_train2017.json.
    """
    split, stem = role_in(file.stem) or role_in(file.parent.name), file.stem.casefold()

    def may_be(part: str) -> bool:
        known = part.casefold() in IMAGES or (split and role_in(part) == split)
        return bool(known) or part.casefold() in stem

    around = [here for here in (file.parent, file.parent.parent) if here in folder.inside]
    bases = [
        here
        for near in around
        for here in folder.inside
        if here.is_relative_to(near) and all(map(may_be, here.relative_to(near).parts))
    ]
    first = names[:SEEN]
    hits = {base: sum(file_at(base, name).is_file() for name in first) for base in bases}
    return sorted(dict.fromkeys(bases), key=lambda base: -hits[base])


def _image(bases: Sequence[Path], name: str) -> tuple[Path, str | None]:
    """The path of an image by its name in a file, and the fault of that name."""
    path, fault = Picture("image").of_line(name, "file_name", bases[0])
    if fault is None:
        files = (file_at(base, name.strip()) for base in bases)
        path = next((file for file in files if file.is_file()), path)
    return Path(path), fault
