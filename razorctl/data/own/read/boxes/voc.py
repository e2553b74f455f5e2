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


def rows(request: DataRequest, folder: Folder, sign: Path, single: bool) -> RawRows:
    """The rows of a folder with XML files of VOC, by ImageSets/Main or by its folders of splits.

    A difficult object is a crowd, which evaluation ignores. Sides of boxes are taken as they are.
    Raises UsageError if it is not clear which splits to use.
    """
    every = sorted(here / name for here, (_, names) in folder.inside.items() for name in names)
    files = [file for file in every if file.suffix.casefold() == ".xml"]
    listed = _listed(folder, files)
    parts = listed or common.by_split(folder, files)
    names = request.splits(list(parts), single=True)
    images, used = common.images_in(folder), set[Path | None]()
    count = sum(map(len, images.values()))
    for named in images.values():
        named |= {image.stem: image for image in named.values()}
    splits = {
        split: common.table(_rows(folder.top, images, parts[name], used))
        for split, name in names.items()
    }
    details = f"boxes in {common.sign(folder, sign)} (Pascal VOC)"
    if (left := count - len(used - {None})) and not listed:
        details += f", without {units.count(left, 'image')} that no XML file in use is for"
    return common.raw_rows(request, folder, splits, names, details, box_format="xyxy")


def _listed(folder: Folder, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Name of a split -> its XML files by ImageSets/Main; empty without that.

    An image without an XML file has one that is not there; a split of such images is left out.
    """
    sets = [here for here in folder.inside if here.parts[-2:] == SETS]
    if len(sets) > 1:
        raise UsageError(
            f"{folder.top} has several sets of Pascal VOC, "
            f"{', '.join(sorted(here.parents[1].name for here in sets))}; name one."
        )
    by_stem = {file.stem: file for file in files}
    parts = {}
    for here in sets:
        lists = {Path(n).stem: here / n for n in folder.inside[here][1] if n.endswith(".txt")}
        named = [name for name in lists if role(name)]
        if "train" not in map(role, named) and WHOLE in lists:
            named = [WHOLE, *(name for name in named if role(name) == "test")]
        for name in named:
            lines = map(str.split, common.text_of(lists[name]).splitlines())
            stems = [words[0] for words in lines if words]
            absent = here.parents[1] / "Annotations"
            of = [by_stem.get(stem, absent / f"{stem}.xml") for stem in stems]
            if any(stem in by_stem for stem in stems):
                parts["train" if name == WHOLE else name] = of
    return parts


def _rows(
    top: Path,
    images: Mapping[Path, Mapping[str, Path]],
    files: Sequence[Path],
    used: set[Path | None],
) -> Iterator[dict[str, Any]]:
    """The rows of XML files; their images are added to `used`.

    images: folder -> name of an image there, with and without its ending -> its path.
    """
    seen: dict[Path, Path] = {}
    for file in files:
        found: list[Any] = []
        fault, size, name = None, None, ""
        try:
            tree = _parsed(file)
            name = tree.findtext("filename", "").strip().replace("\\", "/").rpartition("/")[2]
            sides = [tree.findtext(f"size/{side}", "").strip() for side in ("width", "height")]
            known = all(side.isdecimal() and len(side) < 10 and int(side) for side in sides)
            size = [*map(int, sides)] if known else None
            for number, element in enumerate(tree.iter("object"), 1):
                found.append(_object(element, f"object {number}"))
        except ValueError as error:
            fault = str(error)
        folders = [here for here in _folders(top, images, file) if here in images]
        alike, said = (
            next((images[here][key] for here in folders if key in images[here]), None)
            for key in (file.stem, name)
        )
        image = alike or said
        if image is None:
            fault = fault or "no image of this name"
        elif alike and said and alike != said:
            fault = fault or f"{said.name} is its filename, and {alike.name} has its name"
        elif seen.setdefault(image, file) != file:
            fault = fault or f"its image is also in {seen[image].relative_to(top)}"
        used.add(image)
        yield common.row(image, str(file.relative_to(top)), found, fault, size)


def _folders(top: Path, images: Mapping[Path, Any], file: Path) -> Iterator[Path]:
    """The folders that the image of an XML file may be in, the likeliest first.

    Where the file is in Annotations/a, they are a itself, JPEGImages/a and JPEGImages.
    """
    for near in file.parents:
        if near.is_relative_to(top):
            rest = file.parent.relative_to(near).parts[1:]
            yield near
            for here in images:
                if here.parent == near and here.name.casefold() in IMAGES:
                    yield here.joinpath(*rest)
                    yield here


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


def _object(element: ElementTree.Element, mark: str) -> Any:
    """The object of an element; raises ValueError with its fault."""
    name = element.findtext("name", "").strip()
    if not name:
        raise ValueError(f"{mark}: no name")
    try:
        box = [float(element.findtext(f"bndbox/{side}", "")) for side in SIDES]
    except ValueError:
        raise ValueError(f"{mark}: no bndbox of four numbers") from None
    difficult = element.findtext("difficult", "").strip() not in ("", "0")
    return objects.listed(box, name, difficult, mark)
