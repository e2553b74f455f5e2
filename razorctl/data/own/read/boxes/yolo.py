"""Boxes in text files of YOLO: for each image a file with a line for each box."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from razorctl import units
from razorctl.data.own import labels, objects
from razorctl.data.own.raw import Fault, RawRows
from razorctl.data.own.read.boxes import common
from razorctl.data.own.read.folder import Folder
from razorctl.data.own.request import DataRequest, role
from razorctl.errors import DataError, first_line, lacks_memory
from razorctl.system.folders import spelled

YAML = (".yaml", ".yml")
SIGNS = (rb"(?m)^\s*train\s*:", rb"(?m)^\s*(names|nc)\s*:")  # of a data.yaml
NO_LABELS = ("classes.txt", "labels.txt", "train.txt", "val.txt", "test.txt", "readme.txt")
LARGEST = 1.01  # the largest share of an image, with what rounding adds
Files = Mapping[str, Sequence[Path]]  # name of a split -> its images


@dataclass(frozen=True)
class Description:
    """What a data.yaml says, as Ultralytics reads it.

    file: its path. entries: its keys and values. top: the folder of the data, which paths must not
    leave.
    """

    file: Path
    entries: Mapping[str, Any]
    top: Path

    @classmethod
    def read(cls, file: Path, top: Path) -> "Description":
        """Raises DataError for a file that is no mapping."""
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
        return cls(file, {str(key): value for key, value in entries.items()}, top)

    @property
    def classes(self) -> dict[str, str]:
        """The numbers of the classes, in order, with their names; raises DataError without any."""
        names, count = self.entries.get("names"), self.entries.get("nc")
        if isinstance(names, dict):
            named = {str(number): str(name) for number, name in names.items()}
        elif isinstance(names, list):
            named = {str(number): str(name) for number, name in enumerate(names)}
        else:
            named = {str(n): str(n) for n in range(count if type(count) is int else 0)}
        if not named or not all(map(str.isdecimal, named)):
            raise DataError(f"{self.file} names no classes by their numbers; give it names.")
        if type(count) is int and count != len(named):
            raise DataError(
                f"{self.file} has {units.count(len(named), 'name')}, and nc is {count}; correct it."
            )
        return {number: named[number] for number in sorted(named, key=int)}

    def splits(self) -> tuple[dict[str, list[Path]], list[str]]:
        """Name of a split -> its images, and the names of splits that are not there.

        Raises DataError if the training images are not there.
        """
        found, absent = {}, []
        for name, value in self.entries.items():
            if role(name) and value:
                values = value if isinstance(value, list) else [value]
                places = [self._place(str(each)) for each in values]
                if None in places:
                    absent.append(name)
                else:
                    found[name] = [file for here in places for file in _images(here)]
        if "train" not in map(role, found):
            raise DataError(
                f"the training images of {self.file} ({self.entries.get('train')}) are not in "
                f"{self.top}; correct its paths."
            )
        return found, absent

    def _place(self, name: str) -> Path | None:
        """The folder or the list of images that a path names; None if it is not in the data.

        Paths are relative to `path`, or else to the file. Roboflow's have a `..` too many.
        """
        name = name.replace("\\", "/")
        bases = [self.file.parent / str(self.entries.get("path") or ""), self.file.parent]
        spellings = [name, name.removeprefix("../")]
        for place in (base / spelling for base in bases for spelling in spellings):
            inside = place.resolve().is_relative_to(self.top.resolve())
            if inside and place.exists():
                return self.top / place.resolve().relative_to(self.top.resolve())
        return None


def _images(here: Path | None) -> Iterator[Path]:
    """The images in a folder at any depth, those that a text file lists, or one image."""
    assert here is not None
    if here.is_dir():
        every = common.images_in(Folder.walked(here)).values()
        yield from (file for files in every for file in files.values())
    elif here.suffix.casefold() == ".txt":
        lines = map(str.strip, common.text_of(here).splitlines())
        yield from (here.parent / line.replace("\\", "/") for line in lines if line)
    else:
        yield here


def rows(request: DataRequest, folder: Folder, sign: Path, single: bool = False) -> RawRows:
    """The rows of a folder with labels of YOLO, by a data.yaml or by the names of its folders.

    Outlines become the boxes around them. Raises UsageError if it is not clear which splits to use,
    and DataError for a data.yaml that cannot be used.
    """
    if sign.suffix.casefold() in YAML:
        description = Description.read(sign, folder.top)
        (files, absent), classes = description.splits(), description.classes
    else:
        every = common.images_in(folder).values()
        files = common.by_split(folder, (file for images in every for file in images.values()))
        classes, absent = _classes(folder, sign), []
    names = request.splits(list(files), single=True)
    nowhere: list[Fault] = []
    details = f"boxes in {common.sign(folder, sign)} (YOLO)"
    details += f", without {', '.join(absent)}, which is not there" * bool(absent)
    numbers = {number: str(at) for at, number in enumerate(classes)}
    splits = {}
    for split, name in names.items():
        splits[split] = common.table(_rows(folder, files[name], classes and numbers, nowhere))
    more = {"class_names": tuple(classes.values()) or None, "nowhere": tuple(nowhere)}
    return common.raw_rows(
        request, folder, splits, names, details, box_format="xyxy", shares=True, **more
    )


def _classes(folder: Folder, sign: Path) -> dict[str, str]:
    """The numbers of classes with their names, by a classes.txt; empty without such a file."""
    for here in dict.fromkeys((folder.top, sign.parent, sign.parent.parent)):
        if names := here in folder.inside and labels.class_names_in(here, least=1):
            return {str(number): name for number, name in enumerate(names)}
    return {}


def _rows(
    folder: Folder,
    files: Iterable[Path],
    numbers: Mapping[str, str],
    nowhere: list[Fault],
) -> Iterator[dict[str, Any]]:
    """The rows of images. numbers: number in files -> its class; empty for numbers that are names.

    nowhere: label files without an image are added to it.
    """
    used: set[Path] = set()
    seen: set[Path] = set()
    for file in files:
        labels_file = _labels_of(folder, file)
        used.add(labels_file)
        place = str(labels_file if labels_file.is_file() else file)
        found, fault = _objects(labels_file, numbers)
        if file in seen:
            fault = "an image that is listed twice"
        seen.add(file)
        yield common.row(file, place.removeprefix(f"{folder.top}/"), found, fault)
    for here in {file.parent for file in used if "labels" in map(str.casefold, file.parts)}:
        for name in folder.inside.get(here, ((), ()))[1]:
            file = here / name
            known = file in used or name.casefold() in NO_LABELS
            # An image that no list has is not used, and is there.
            known = known or file.stem in folder.stems(folder.images_for(file))
            if not known and name.casefold().endswith(".txt"):
                place = spelled(str(file.relative_to(folder.top)))
                nowhere.append(Fault(place, "labels without an image"))


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
    """The objects of a label file, and its fault or None; without a file there are none."""
    found: list[Any] = []
    if not file.is_file():
        return found, None
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
        raise ValueError(f"{mark}: a class of {words[0]}, which is no whole number")
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
