"""Folders that no model is for: they are refused by what they are, which their files tell."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from razorctl import documents
from razorctl.data.own import folder
from razorctl.data.own.ask import Ask, role
from razorctl.data.own.columns import SUFFIXES
from razorctl.data.own.recognition import of_others
from razorctl.data.own.unsupported import AUDIO, coco, refused
from razorctl.tasks import Task

SEEN = 50  # files of a folder that are looked at
OF_BOXES = ("annotations", "annotation", "labels", "xmls", "xml")  # folders
YOLO = re.compile(rb"\s*\d+(\s+[\d.eE+-]+){4,}\s*(\n|$)")


def _begins(file: Path) -> bytes:
    """The first bytes of a file; none if it cannot be read."""
    with suppress(OSError), documents.open_regular(file) as stream:
        return stream.read(1 << 16)
    return b""


@dataclass(frozen=True)
class Folder:
    """What is in a folder: each folder below it -> the names of its folders and of its files."""

    top: Path
    inside: Mapping[Path, tuple[Sequence[str], Sequence[str]]]

    @classmethod
    def walked(cls, top: Path) -> "Folder":
        inside = {}
        for here, folders, files in os.walk(top):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            inside[Path(here)] = folders, [name for name in files if not name.startswith(".")]
        return cls(top, inside)

    def files(self, *endings: str) -> Iterator[Path]:
        """The first SEEN files of each folder that have one of these endings."""
        for here, (_, found) in self.inside.items():
            own = (name for name in found if Path(name).suffix.casefold() in endings)
            yield from (here / name for name in islice(own, SEEN))

    def stems(self, here: Path) -> set[str]:
        """The names of the images in a folder, without their endings."""
        found = map(Path, self.inside.get(here, ((), ()))[1])
        return {file.stem for file in found if file.suffix.casefold() in SUFFIXES}

    @cached_property
    def images(self) -> bool:
        return any(self.files(*SUFFIXES))

    @property
    def drawn(self) -> bool:
        """Whether it has images with masks, as `folder.layout` finds them."""
        near = [self.top, *(self.top / name for name in self.inside[self.top][0])]
        called = [{name.casefold() for name in self.inside[here][0]} for here in near]
        if not any(of & {*folder.IMAGES} and of & {*folder.MASKS} for of in called):
            return False
        parts = folder.layout(self.top) or {}
        return any(
            file.is_relative_to(of) for _, of in parts.values() for file in self.files(*SUFFIXES)
        )


def _documents(folder: Folder) -> Path | None:
    return next(filter(coco, islice(folder.files(".json"), SEEN)), None)


def _lines(folder: Folder) -> Path | None:
    """A file with a class and a box on each line, beside its image or in `labels` for `images`."""
    for file in islice(folder.files(".txt"), SEEN):
        own = file.parent.relative_to(folder.top).parts
        if own and "labels" not in own and not role(own[-1]):
            continue  # a folder of a class, say
        beside = folder.top.joinpath(*("images" if part == "labels" else part for part in own))
        if file.stem in folder.stems(beside) and YOLO.match(_begins(file)):
            return file
    return None


def _xml(folder: Folder) -> Path | None:
    own = (file for file in folder.files(".xml") if file.parent.name.casefold() in OF_BOXES)
    return next((f for f in islice(own, SEEN) if b"<bndbox>" in _begins(f)), None)


def _recorded(folder: Folder) -> Path | None:
    return None if folder.images else next(folder.files(*AUDIO), None)


def _captioned(folder: Folder) -> Path | None:
    own = (file for file in folder.files(".txt") if file.parent == folder.top)
    return next((file for file in own if file.stem in folder.stems(folder.top)), None)


def _unsorted(folder: Folder) -> Path | None:
    """The first of folders that are called as splits and have images, but no folders of classes."""
    inside = [folder.top / name for name in folder.inside[folder.top][0]]
    split = inside and all(role(here.name) and not folder.inside[here][0] for here in inside)
    return inside[0] if split and folder.images else None


def _sorted_texts(folder: Folder) -> Path | None:
    """The first of the folders of classes of texts in those of splits."""
    splits = [folder.top / name for name in folder.inside[folder.top][0] if role(name)]
    if not splits or folder.images:
        return None
    classes = [folder.inside[here][0] for here in splits]
    alike = set(classes[0]).intersection(*classes)
    texts = {file.parent for file in folder.files(".txt")}
    found = [splits[0] / name for name in classes[0] if name in alike and splits[0] / name in texts]
    return found[0] if len(found) > 1 else None


class OfFolder(NamedTuple):
    """As `Kind`, for folders. looks: gives a file or folder that tells, or None."""

    what: str
    looks: Callable[[Folder], Path | None]
    mend: str
    usual: Task | None = None  # the usual task of models that take the folder for something else


MASKS = "give folders images and masks, or a folder of images for each class"
FOLDERS = (
    OfFolder("boxes or outlines of objects (COCO)", _documents, MASKS),
    OfFolder("boxes of objects (YOLO)", _lines, MASKS),
    OfFolder("boxes of objects (Pascal VOC)", _xml, MASKS),
    OfFolder("sound", _recorded, "choose other data"),
    OfFolder("images with captions", _captioned, "give a folder of images for each class"),
    OfFolder("images of no class", _unsorted, "give a folder for each class inside it"),
    OfFolder("a folder of texts for each class", _sorted_texts,
             "write a table with a text and a label on each row", "classification"),
)  # fmt: skip


def refuse_folder(ask: Ask, top: Path) -> None:
    """Raises UsageError for a folder of one of FOLDERS, and for masks that the model is not for."""
    folder = Folder.walked(top)
    if folder.drawn:
        if "segmentation" not in ask.tasks and ask.task is None:
            override = "give --task classification if its folders are classes"
            raise of_others(ask, "images with masks", "segmentation", override)
        return
    for kind in FOLDERS:
        if kind.usual in (None, ask.tasks[0]) and (found := kind.looks(folder)) is not None:
            raise refused(ask.name, kind.what, str(found.relative_to(top)), kind.mend)
