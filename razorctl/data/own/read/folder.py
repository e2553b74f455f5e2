"""Folders of images: a folder for each class, or images and masks; in folders of splits or not."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

from razorctl.data.own import labels
from razorctl.data.own.raw import NOT_UTF8, Fault, RawRows, not_utf8, walk
from razorctl.data.own.read.column import SUFFIXES
from razorctl.data.own.request import STDIN, DataRequest, role, role_in
from razorctl.data.own.store import text_table
from razorctl.errors import DataError, UsageError
from razorctl.system.folders import shown, spelled

IMAGES = ("images", "image", "img", "jpegimages")  # the first one that exists counts
MASKS = ("masks", "mask", "segmentationclass", "annotations", "annotation", "labels", "label")
Parts = Mapping[str, tuple[Path, Path]]  # name of a split -> the folders of images and of masks
ARCHIVES = frozenset({".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar", ".zst"})
NUMBER = re.compile(r"[-_ ]?\d+$")  # ends the name of a fold
SEEN = 50  # files of a folder that are looked at
IMAGE = rf"(?is).*\.({'|'.join(suffix[1:] for suffix in SUFFIXES)})"  # a path with `labels` in it


def class_rows(request: DataRequest, folder: Path) -> RawRows:
    """The images of a folder of classes; the folder of a class may have folders inside.

    Other files are left out, but an archive is a bad row. Raises UsageError if it is not clear
    which splits to use, and DataError if there are no class folders.
    """
    folders = _splits(request, folder)
    _check_depth(request, folder, folders["train"])
    nowhere: list[Fault] = []
    others: set[str] = set()
    splits = {}
    for split, name in folders.items():
        rows = _images(folder, folder / name, nowhere, others)
        splits[split] = text_table(rows, "image", "label", "place", "fault")
    if not any(map(len, splits.values())) and not nowhere:
        raise DataError(
            f"{request.name} has no folders with images; give a folder for each class, or a table."
        )
    if request.split is None and folders["train"] != ".":
        used = {Path(name).parts[0] for name in folders.values()}
        others |= {spelled(part.name) for part in folders_in(folder)} - used
    details = "a folder for each class"
    if others:
        details += f", without its {', '.join(sorted(others))}"
    top = folder.resolve().name
    names = {split: top if name == "." else name for split, name in folders.items()}
    if deep := [*chain.from_iterable(map(folders_in, folders_in(folder / folders["train"])))]:
        details += f", with all inside it, as {spelled(str(deep[0].relative_to(folder)))}"
    return RawRows(request.name, splits, names, details, nowhere=tuple(nowhere), sorted=True)


def image_rows(request: DataRequest, names: Iterable[str], stdin: Iterable[str]) -> RawRows:
    """Images without labels: files, files in folders, and files that standard input names.

    A row has a `name`, the path of the image in its folder. Raises DataError for a folder without
    images.
    """
    rows = (
        {
            "image": spelled(path),
            "place": spelled(path),
            "name": spelled(name),
            "fault": not_utf8(path),
        }
        for argument in names
        for path, name in _named_images(request, argument, stdin)
    )
    table = text_table(rows, "image", "place", "name", "fault")
    return RawRows("images", {"test": table}, {"test": "images"}, "")


def _named_images(request: DataRequest, name: str, stdin: Iterable[str]) -> list[tuple[str, str]]:
    """The path of each image, and its path in the folder that is named.

    For segmentation the folder of masks is left out.
    """
    top = Path(name)
    if name == STDIN or not top.is_dir():
        return [(path, Path(path).name) for path in (stdin if name == STDIN else [name])]
    parts = pairs(top) if request.task == "segmentation" else None
    folders = {"": top}
    if parts is not None:
        folders = {split if len(parts) > 1 else "": images for split, (images, _) in parts.items()}
    files = [
        (str(file), str(Path(split, file.relative_to(here))))
        for split, here in folders.items()
        for file in files_below(here, set())
    ]
    if not files:
        raise DataError(f"{name} has no images; name another folder.")
    return files


def _splits(request: DataRequest, folder: Path) -> dict[str, str]:
    """Split -> its folder; "." for train if there are no splits."""
    # photos/photos, as an unpacked archive is, stands for the inner folder.
    inside = {part: folders_in(part) for part in folders_in(folder)}
    alike = {part: [one.name for one in of] == [part.name] for part, of in inside.items()}
    parts = {part.name: inside[part][0] if alike[part] else part for part in inside}
    if request.split is None:
        # A folder called train with images in it is a class.
        parts = {name: here for name, here in parts.items() if folders_in(here)}
        if "train" in map(role, parts):
            parts = {name: here for name, here in parts.items() if role(name)}
        elif not (parts := _alike(parts)):
            return {"train": "."}
    splits = request.splits(list(parts))
    return {split: str(parts[name].relative_to(folder)) for split, name in splits.items()}


def _alike(parts: Mapping[str, Path]) -> dict[str, Path]:
    """The folders named like splits or folds (`fold1`, `fold2`), if they share their classes."""
    stems = [NUMBER.sub("", name) for name in parts]
    named = [n for n, stem in zip(parts, stems, strict=True) if role_in(n) or stems.count(stem) > 1]
    inside = [{part.name for part in folders_in(parts[name])} for name in named]
    alike = len(named) > 1 and len(set.intersection(*inside)) > 1
    return {name: parts[name] for name in named} if alike else {}


def _check_depth(request: DataRequest, top: Path, split: str) -> None:
    """Raises UsageError for a folder that contains the folder of classes, or that is a class."""
    whole = here = top / split
    while len(inside := folders_in(here)) == 1 and not inside[0].is_symlink():
        here = inside[0]
    if here != whole and len(inside) > 1 and all(Folder.walked(one).images for one in inside):
        few = ", ".join(spelled(one.name) for one in inside[:5])
        raise UsageError(
            f"all images of {whole} are in {here}, which has the folders {few}; name that if these "
            "are the classes or the splits."
        )
    around = top.absolute().parent
    if not folders_in(whole) and Folder.walked(whole).images and len(folders_in(around)) > 1:
        raise UsageError(
            f"{request.name} has images and no folders of classes; if it is a class itself, name "
            f"the folder around it, {around}."
        )


def folders_in(folder: Path) -> list[Path]:
    """The folders in a folder, not in those, in order and without hidden ones."""
    return sorted(path for path in folder.iterdir() if shown(path.name) and path.is_dir())


def _images(
    top: Path, folder: Path, nowhere: list[Fault], others: set[str]
) -> Iterator[dict[str, str | None]]:
    """The rows of a split.

    nowhere: class folders without images are added to it. others: so are endings of other files.
    """
    for label in folders_in(folder):
        loops = folder.resolve().is_relative_to(label.resolve())
        files = [] if loops else [*files_below(label, others)]
        yield from (_row(top, file, label.name) for file in files)
        if not files:
            fault = "a link to a folder around it" if loops else "a class folder without images"
            nowhere.append(Fault(spelled(str(label.relative_to(top))), fault))
    # Links that lead nowhere are neither files nor folders.
    loose = (path for path in folder.iterdir() if not path.is_dir() and _counts(path, others))
    yield from (_row(top, file, None) for file in sorted(loose))


def _row(top: Path, file: Path, label: str | None) -> dict[str, str | None]:
    fault = None if label else "in no class folder"
    if file.suffix.casefold() in ARCHIVES:
        fault = "an archive: unpack it"
    place = spelled(str(file.relative_to(top)))
    image, fault = str(file), not_utf8(str(file)) or fault
    label = None if label is None else spelled(label)
    return {"image": spelled(image), "label": label, "place": place, "fault": fault}


def files_below(folder: Path, others: set[str]) -> Iterator[Path]:
    """The images and archives at any depth in a folder, in order; others: as in `_images`."""
    for here, inside, files in walk(folder):
        inside[:] = sorted(filter(shown, inside))
        others.update("links to folders" for name in inside if Path(here, name).is_symlink())
        yield from (path for name in sorted(files) if _counts(path := Path(here, name), others))


def _counts(file: Path, others: set[str]) -> bool:
    """Whether the name of a file has an ending of images or archives, or no ending."""
    ending = file.suffix.casefold()
    if not shown(file.name):
        return False
    if ending in SUFFIXES or ending in ARCHIVES or not ending:
        return True
    others.add(f"*{spelled(ending)}")
    return False


def pairs(folder: Path) -> Parts | None:
    """The folders of images and of masks in a folder, of each split; None if there are none.

    Folders `images` and `masks` are in the folder or in the folder of each split, or have folders
    of splits inside. Without splits there is one, with the folder's name.
    """
    both = _both(folder)
    if both is not None:
        inside = [{part.name for part in where.iterdir() if part.is_dir()} for where in both]
        splits = sorted(part for part in inside[0] & inside[1] if role(part))
        if splits:
            return {split: (both[0] / split, both[1] / split) for split in splits}
        return {folder.resolve().name: both}
    parts = sorted(part for part in folder.iterdir() if part.is_dir())
    return {part.name: pair for part in parts if (pair := _both(part)) is not None} or None


def _both(folder: Path) -> tuple[Path, Path] | None:
    inside = {part.name.casefold(): part for part in folder.iterdir() if part.is_dir()}
    pair = [next((inside[n] for n in of if n in inside), None) for of in (IMAGES, MASKS)]
    return (pair[0], pair[1]) if pair[0] is not None and pair[1] is not None else None


def mask_rows(request: DataRequest, folder: Path, parts: Parts) -> RawRows:
    """The images and masks of a folder: `a.jpg` and `a.png` are a pair.

    A file of class names is in the folder or in the folder of training masks. Raises UsageError if
    it is not clear which splits to use, and DataError if there are none.
    """
    names = request.splits(list(parts), single=True)
    splits = {
        split: text_table(_pairs(folder, *parts[name]), "image", "mask", "place", "fault")
        for split, name in names.items()
    }
    train_masks = parts[names["train"]][1]
    return RawRows(
        name=request.name,
        splits=splits,
        names=names,
        details=f"masks in {train_masks.relative_to(folder)}",
        class_names=labels.class_names_in(folder) or labels.class_names_in(train_masks),
        task="segmentation",
    )


def _pairs(top: Path, of_images: Path, of_masks: Path) -> Iterator[dict[str, str | None]]:
    by_stem: dict[Path, dict[str, list[Path]]] = {}
    for what, folder in (("image", of_images), ("mask", of_masks)):
        for file in files_below(folder, set()):
            stem = file.relative_to(folder).with_suffix("")
            by_stem.setdefault(stem, {"image": [], "mask": []})[what].append(file)
    for stem in sorted(by_stem):
        pair = by_stem[stem]
        fault = next((f"two {what}s of this name" for what in pair if len(pair[what]) > 1), None)
        fault = next((f"no {what} of this name" for what in pair if not pair[what]), fault)
        image, mask = (str(files[0]) if files else None for files in pair.values())
        place = spelled(str(Path(image or mask or "").relative_to(top)))
        if any(path is not None and spelled(path) != path for path in (image, mask)):
            image, mask, fault = "", "", NOT_UTF8
        yield {"image": image, "mask": mask, "place": place, "fault": fault}


@dataclass(frozen=True)
class Folder:
    """The contents of a folder. inside: each folder in it -> names of its folders and its files."""

    top: Path
    inside: Mapping[Path, tuple[Sequence[str], Sequence[str]]]

    @classmethod
    def walked(cls, top: Path) -> "Folder":
        inside = {}
        links = [part for part in folders_in(top) if part.is_symlink()]
        for here, folders, files in chain.from_iterable(map(walk, (top, *links))):
            folders[:] = sorted(filter(shown, folders))
            inside[Path(here)] = folders, [*filter(shown, files)]
        return cls(top, inside)

    def matches(self, pattern: str) -> Iterator[Path]:
        """The files whose path in this folder matches a pattern, at most SEEN of each folder."""
        whole = re.compile(pattern)
        for here, (_, names) in self.inside.items():
            above = "" if here == self.top else f"{here.relative_to(self.top).as_posix()}/"
            files = (name for name in names if whole.fullmatch(above + name))
            yield from (here / name for name in islice(files, SEEN))

    def stems(self, here: Path) -> set[str]:
        """The names of the images in a folder, without their endings."""
        files = map(Path, self.inside.get(here, ((), ()))[1])
        return {file.stem for file in files if file.suffix.casefold() in SUFFIXES}

    def images_for(self, file: Path) -> Path:
        """The folder with the image of a label file: `labels` in its path becomes `images`."""
        parts = file.parent.relative_to(self.top).parts
        return self.top.joinpath(*("images" if part == "labels" else part for part in parts))

    @cached_property
    def images(self) -> bool:
        return any(self.matches(IMAGE))

    @property
    def unsorted(self) -> bool:
        """Whether it has images, and all its folders are splits without class folders."""
        inside = [self.top / name for name in self.inside[self.top][0]]
        splits = all(role(here.name) and not self.inside[here][0] for here in inside)
        return bool(inside) and splits and self.images

    @property
    def has_masks(self) -> bool:
        """Whether it has images with masks, as `pairs` finds them."""
        near = [self.top, *(self.top / name for name in self.inside[self.top][0])]
        folders = [{name.casefold() for name in self.inside[here][0]} for here in near]
        if not any(names & {*IMAGES} and names & {*MASKS} for names in folders):
            return False
        parts = pairs(self.top) or {}
        return any(
            file.is_relative_to(of) for _, of in parts.values() for file in self.matches(IMAGE)
        )
