"""Boxes in text files of YOLO: for each image a file with a line for each box."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from razorctl import units
from razorctl.data.own import labels, objects
from razorctl.data.own.raw import Fault, RawRows
from razorctl.data.own.read.boxes import common
from razorctl.data.own.read.folder import Folder
from razorctl.data.own.request import DataRequest, role
from razorctl.errors import DataError, first_line, lacks_memory
from razorctl.system.folders import exists, spelled

YAML = (".yaml", ".yml")
SIGNS = (rb"(?m)^\s*train\s*:", rb"(?m)^\s*(names|nc)\s*:")  # of a data.yaml
NO_LABELS = ("classes.txt", "labels.txt", "train.txt", "val.txt", "test.txt", "readme.txt")
LARGEST = 1.01  # the largest share of an image, with what rounding adds


def rows(request: DataRequest, folder: Folder, sign: Path, single: bool) -> RawRows:
    """The rows of a folder with labels of YOLO, by a data.yaml or by the names of its folders.

    Outlines become the boxes around them. Raises UsageError if it is not clear which splits to use,
    and DataError for a data.yaml that cannot be used.
    """
    absent: list[str] = []
    if sign.suffix.casefold() in YAML:
        description = _description(sign)
        files, classes = _described(folder, sign, description, absent), _named(sign, description)
    else:
        every = common.images_in(folder).values()
        files = common.by_split(folder, (file for images in every for file in images.values()))
        classes = _classes(folder, sign)
    names = request.splits(list(files), single=True)
    nowhere: list[Fault] = []
    numbers = {number: str(at) for at, number in enumerate(classes)}
    splits = {
        split: common.table(_rows(folder, files[name], numbers, nowhere))
        for split, name in names.items()
    }
    details = f"boxes in {common.sign(folder, sign)} (YOLO)"
    details += f", without {' and '.join(absent)}, whose images are not there" * bool(absent)
    more = {"class_names": tuple(classes.values()) or None, "nowhere": tuple(nowhere)}
    return common.raw_rows(
        request, folder, splits, names, details, box_format="xyxy", shares=True, **more
    )


def _description(file: Path) -> dict[str, Any]:
    """The keys and values of a data.yaml; raises DataError for other files."""
    import yaml  # type: ignore[import-untyped]

    text = common.text_of(file)
    try:
        entries = yaml.safe_load(text)
    except Exception as error:  # yaml raises many kinds
        if lacks_memory(error):
            raise
        raise DataError(f"{file} is not YAML ({first_line(error)}); correct it.") from None
    if not isinstance(entries, dict):
        raise DataError(f"{file} has no names and no train; give it both.")
    if "kpt_shape" in entries:
        raise DataError(f"{file} is of keypoints (kpt_shape); give labels of boxes alone.")
    return {str(key): value for key, value in entries.items()}


def _named(file: Path, description: Mapping[str, Any]) -> dict[str, str]:
    """The numbers of the classes, in order, with their names; raises DataError without any."""
    names, count = description.get("names"), description.get("nc")
    pairs: Iterable[tuple[Any, Any]] = ((n, n) for n in range(count if type(count) is int else 0))
    if isinstance(names, (dict, list)):
        pairs = names.items() if isinstance(names, dict) else enumerate(names)
    named = {str(n): str(name) for n, name in pairs if isinstance(name, (str, int, float))}
    if not named or not all(map(str.isdecimal, named)):
        raise DataError(f"{file} names no classes by their numbers; give it names.")
    if type(count) is int and count != len(named):
        has = units.count(len(named), "name")
        raise DataError(f"{file} has {has}, and nc is {count}; correct it.")
    return {number: named[number] for number in sorted(named, key=int)}


def _described(
    folder: Folder, file: Path, description: Mapping[str, Any], absent: list[str]
) -> dict[str, list[Path]]:
    """Name of a split -> its images by a data.yaml; splits that are not there go to `absent`.

    Raises DataError if the training images are not in the folder.
    """
    found = {}
    for name, value in description.items():
        if role(name) and value:
            values = value if isinstance(value, list) else [value]
            named = [each for each in values if isinstance(each, str)]
            places = [_place(folder.top, file, description.get("path"), each) for each in named]
            here = [place for place in places if place is not None]
            if len(here) == len(values):
                found[name] = [image for place in here for image in _images(place)]
            else:
                absent.append(name)
    if "train" not in map(role, found):
        raise DataError(
            f"the training images of {file} are not in {folder.top}; correct its paths."
        )
    return found


def _place(top: Path, file: Path, base: Any, name: str) -> Path | None:
    """The folder or the list of images that a path in a data.yaml names; None if it is not in top.

    As Ultralytics does, paths are relative to `base`, its `path`, or else to the file; Roboflow's
    have a `..` too many.
    """
    name, whole = name.replace("\\", "/"), top.resolve()
    near = file.parent
    for here in (near / base, near) if isinstance(base, str) else (near,):
        for spelling in (name, name.removeprefix("../")):
            place = Path(os.path.realpath((here / spelling).as_posix().replace("\0", "")))
            if place.is_relative_to(whole) and exists(place):
                return top / place.relative_to(whole)
    return None


def _images(here: Path) -> Iterator[Path]:
    """The images in a folder at any depth, those that a text file lists, or one image."""
    if here.is_dir():
        for images in common.images_in(Folder.walked(here)).values():
            yield from images.values()
    elif here.suffix.casefold() == ".txt":
        lines = (line.strip().replace("\\", "/") for line in common.text_of(here).splitlines())
        yield from (here.parent / line for line in lines if line)
    else:
        yield here


def _classes(folder: Folder, sign: Path) -> dict[str, str]:
    """The numbers of classes with their names, by a classes.txt; empty without such a file."""
    for here in dict.fromkeys((folder.top, sign.parent, sign.parent.parent)):
        if names := here in folder.inside and labels.class_names_in(here, least=1):
            return {str(number): name for number, name in enumerate(names)}
    return {}


def _rows(
    folder: Folder, files: Iterable[Path], numbers: Mapping[str, str], nowhere: list[Fault]
) -> Iterator[dict[str, Any]]:
    """The rows of images. numbers: number in files -> its class; empty for numbers that are names.

    nowhere: label files without an image are added to it.
    """
    used: set[Path] = set()
    seen: set[Path] = set()
    for file in files:
        labeled = _labels_of(folder, file)
        found, fault = _objects(labeled, numbers) if labeled.is_file() else ([], None)
        place = labeled if labeled.is_file() else file
        fault = "an image that is listed twice" if file in seen else fault
        used.add(labeled)
        seen.add(file)
        yield common.row(file, str(place).removeprefix(f"{folder.top}/"), found, fault)
    for here in {file.parent for file in used if "labels" in map(str.casefold, file.parts)}:
        texts = (n for n in folder.inside.get(here, ((), ()))[1] if n.casefold().endswith(".txt"))
        for file in (here / name for name in texts if name.casefold() not in NO_LABELS):
            # An image that no list has is not used, and is there.
            if file not in used and file.stem not in folder.stems(folder.images_for(file)):
                where = spelled(str(file.relative_to(folder.top)))
                nowhere.append(Fault(where, "labels without an image"))


def _labels_of(folder: Folder, file: Path) -> Path:
    """The label file of an image: in `labels` where that is in `images`, or else beside it."""
    parts = file.relative_to(folder.top).parts if file.is_relative_to(folder.top) else file.parts
    at = next((n for n in range(len(parts) - 2, -1, -1) if parts[n].casefold() == "images"), None)
    beside = file.with_suffix(".txt")
    if at is None:
        return beside
    near = folder.top.joinpath(*parts[:at])
    name = next((n for n in folder.inside.get(near, ((), ()))[0] if n.casefold() == "labels"), None)
    if name is None:
        return beside
    parallel = near.joinpath(name, *parts[at + 1 :]).with_suffix(".txt")
    return beside if beside.is_file() and not parallel.is_file() else parallel


def _objects(file: Path, numbers: Mapping[str, str]) -> tuple[list[Any], str | None]:
    """The objects of a label file, and its fault or None."""
    found: list[Any] = []
    try:
        for line, text in enumerate(common.text_of(file).splitlines(), 1):
            if text.strip():
                found.append(_object(text.split(), numbers, f"line {line}"))
    except ValueError as error:
        return found, str(error)
    except DataError:
        return found, "no text in UTF-8"
    return found, None


def _object(words: Sequence[str], numbers: Mapping[str, str], mark: str) -> Any:
    """The object of a line; raises ValueError with its fault."""
    try:
        number, *values = map(float, words)
    except ValueError:
        raise ValueError(f"{mark}: not all numbers") from None
    if not number.is_integer() or number < 0:
        raise ValueError(f"{mark}: a class of {words[0]}, which is not a whole number")
    if len(values) < 4 or (len(values) != 4 and (len(values) < 6 or len(values) % 2)):
        raise ValueError(f"{mark}: {len(words)} numbers, not a class and four, or an outline")
    if any(value > LARGEST for value in values):
        raise ValueError(f"{mark}: numbers above 1, as if of pixels, not shares of the image")
    if len(values) == 4:
        x, y, width, height = values
        box = [x - width / 2, y - height / 2, x + width / 2, y + height / 2]
    else:
        xs, ys = values[::2], values[1::2]
        box = [min(xs), min(ys), max(xs), max(ys)]
    name = str(int(number))
    if numbers and name not in numbers:
        raise ValueError(f"{mark}: a class of {name}, which has no name")
    return objects.listed(box, numbers.get(name, name), mark=mark)
