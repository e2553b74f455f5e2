"""Boxes in XML files of Pascal VOC: one for each image."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from razorctl import units
from razorctl.data.own import objects
from razorctl.data.own.raw import RawRows
from razorctl.data.own.read.boxes import common
from razorctl.data.own.read.folder import IMAGES, Folder
from razorctl.data.own.request import DataRequest, role
from razorctl.errors import UsageError, raise_lack
from razorctl.system import documents

SIDES = ("xmin", "ymin", "xmax", "ymax")
SETS = ("ImageSets", "Main")  # the folder with a list of images for each split
WHOLE = "trainval"  # the list of training and validation images


class _Plain(ElementTree.TreeBuilder):
    """Builds elements; refuses a DTD, whose entities may name files or grow without end."""

    def doctype(self, name: str, pubid: str | None, system: str | None) -> None:
        raise ValueError("a DTD, which is not read")


def rows(request: DataRequest, folder: Folder, sign: Path, single: bool = False) -> RawRows:
    """The rows of a folder with XML files of VOC, by ImageSets/Main or by its folders of splits.

    A difficult object is a crowd, which evaluation ignores. Sides of boxes are taken as they are.
    Raises UsageError if it is not clear which splits to use.
    """
    files = {}
    for file in sorted(here / n for here, (_, names) in folder.inside.items() for n in names):
        if file.suffix.casefold() == ".xml":
            files[file] = file.stem
    listed = _listed(folder, files)
    parts = listed or common.by_split(folder, files)
    names = request.splits(list(parts), single=True)
    every = common.images_in(folder)
    used: set[Path | None] = set()
    splits = {s: common.table(_rows(folder, every, parts[name], used)) for s, name in names.items()}
    left = sum(map(len, every.values())) - len(used)
    details = f"boxes in {common.sign(folder, sign)} (Pascal VOC)"
    if left and not listed:
        details += f", without {units.count(left, 'image')} that no used XML file names"
    return common.raw_rows(request, folder, splits, names, details, box_format="xyxy")


def _listed(folder: Folder, files: Mapping[Path, str]) -> dict[str, list[Path]]:
    """Name of a split -> its XML files by ImageSets/Main; empty without that.

    An image without an XML file has one that is not there; a split of such images is left out.
    """
    sets = [here for here in folder.inside if here.parts[-2:] == SETS]
    if len(sets) > 1:
        raise UsageError(
            f"{folder.top} has several sets of Pascal VOC, "
            f"{', '.join(sorted(here.parents[1].name for here in sets))}; name one."
        )
    by_stem = {stem: file for file, stem in files.items()}
    parts = {}
    for here in sets:
        lists = {Path(n).stem: here / n for n in folder.inside[here][1] if n.endswith(".txt")}
        named = [name for name in lists if role(name)]
        if "train" not in map(role, named) and WHOLE in lists:
            named = [WHOLE, *(name for name in named if role(name) == "test")]
        for name in named:
            stems = [
                words[0]
                for line in common.text_of(lists[name]).splitlines()
                if (words := line.split())
            ]
            around = here.parents[1] / "Annotations"
            of = [by_stem.get(stem, around / f"{stem}.xml") for stem in stems]
            if any(stem in by_stem for stem in stems):
                parts["train" if name == WHOLE else name] = of
    return parts


def _rows(
    folder: Folder,
    every: Mapping[Path, Mapping[str, Path]],
    files: Sequence[Path],
    used: set[Path | None],
) -> Iterator[dict[str, Any]]:
    """The rows of XML files. every: as `common.images_in`. used: the images are added to it."""
    seen: dict[Path, Path] = {}
    for file in files:
        found: list[Any] = []
        fault, size, name = None, None, ""
        try:
            tree = _parsed(file)
            name = tree.findtext("filename") or ""
            size = _size(tree)
            for number, element in enumerate(tree.iter("object"), 1):
                found.append(_object(element, f"object {number}"))
        except ValueError as error:
            fault = str(error)
        image = _image(every, file, name.strip())
        if image is None:
            fault = fault or "no image of this name"
        elif seen.setdefault(image, file) != file:
            fault = fault or f"its image is also in {seen[image].relative_to(folder.top)}"
        used.add(image)
        yield common.row(image, str(file.relative_to(folder.top)), found, fault, size)


def _parsed(file: Path) -> ElementTree.Element:
    """The annotation in an XML file; raises ValueError with the fault of a file that has none."""
    try:
        content = documents.read_bytes(file, documents.LARGEST_FOREIGN)
        return ElementTree.fromstring(content, ElementTree.XMLParser(target=_Plain()))
    except ElementTree.ParseError as error:
        raise ValueError(f"not XML: {error}") from None
    except FileNotFoundError:
        raise ValueError("no such file") from None
    except OSError as error:
        raise_lack(error)
        raise ValueError(error.strerror or str(error)) from None


def _size(tree: ElementTree.Element) -> list[int] | None:
    """The width and height of the image that a file says; None if it says none."""
    sides = [tree.findtext(f"size/{side}", "").strip() for side in ("width", "height")]
    known = all(side.isdecimal() and int(side) > 0 for side in sides)
    return [*map(int, sides)] if known else None


def _object(element: ElementTree.Element, mark: str) -> Any:
    """The object of an element; raises ValueError with its fault."""
    name = (element.findtext("name") or "").strip()
    if not name:
        raise ValueError(f"{mark}: no name")
    try:
        box = [float(element.findtext(f"bndbox/{side}", "")) for side in SIDES]
    except ValueError:
        raise ValueError(f"{mark}: no bndbox of four numbers") from None
    difficult = element.findtext("difficult", "").strip() not in ("", "0")
    return objects.listed(box, name, difficult, mark)


def _image(every: Mapping[Path, Mapping[str, Path]], file: Path, name: str) -> Path | None:
    """The image of an XML file: with the name that it says, or else with its own; None without one.

    It is in the folder of the file, or in a folder of images where that is in Annotations.
    """
    deep = [
        Path(*file.parts[:at], part, *file.parts[at + 1 : -1])
        for at in range(len(file.parts) - 2, 0, -1)
        for part in _folders_of_images(every, Path(*file.parts[:at]))
    ]
    folders = [here for here in (file.parent, *deep, file.parent.parent) if here in every]
    base = name.replace("\\", "/").rpartition("/")[2]
    for here in folders:
        if base in every[here]:
            return every[here][base]
    for here in folders:
        for image in every[here].values():
            if image.stem == file.stem:
                return image
    return None


def _folders_of_images(every: Mapping[Path, Any], near: Path) -> list[str]:
    return [here.name for here in every if here.parent == near and here.name.casefold() in IMAGES]
