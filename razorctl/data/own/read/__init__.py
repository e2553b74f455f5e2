"""Reads the rows of a path or of a set of the hub; each kind of data has a file here."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from razorctl.data.catalog import DATASETS
from razorctl.data.own import in_memory
from razorctl.data.own.raw import NOT_UTF8, RawRows
from razorctl.data.own.read import (
    boxes,
    caption_files,
    folder,
    hub,
    layout,
    recognition,
    refused,
    tables,
    texts,
)
from razorctl.data.own.read.column import SUFFIXES
from razorctl.data.own.request import STDIN, DataRequest, role
from razorctl.errors import DataError, UsageError, raise_lack
from razorctl.models import Modality
from razorctl.registry import unknown
from razorctl.system.folders import exists, spelled

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # ORG/NAME
SEPARATORS = tuple(filter(None, (os.sep, os.altsep)))


def raw(request: DataRequest) -> RawRows:
    """The rows of the data that a request names; raises what `own.find` raises."""
    if on_hub(request):
        return hub.hub_rows(request)
    path = Path(request.name).expanduser()
    _check_path(request.name, path)
    try:
        found = texts.of_file(request, path) or caption_files.of_file(request, path)
        found = found or boxes.of_file(request, path)
        return found or tables.at(request, path) or _of_folder(request, path)
    except OSError as error:
        raise_lack(error)
        reason = error.strerror or str(error)
        raise DataError(
            f"{error.filename or request.name} cannot be read ({reason}); correct that."
        ) from None


def unlabeled(
    request: DataRequest, names: Iterable[str], modality: Modality, stdin: Iterable[str]
) -> Iterator[RawRows]:
    """The rows without labels of each table, of each text file, and of each series of images.

    The rows are the test split. Raises UsageError for files of another kind, and DataError for
    files that cannot be read and for folders without files.

    names: files, folders, and STDIN, which stands for the lines in `stdin`. modality: of the model;
    one that embeds images and texts takes both.
    """
    files = [file for name in names for file in _files(name, modality)]
    stdin = [*stdin]
    single = None if request.embeds == "image" else modality

    def kind(name: str) -> tuple[bool, Modality | None]:
        is_table = layout.is_table(Path(name))
        return is_table, single or (None if is_table else _looks(name, stdin))

    for (is_table, of), group in groupby(files, key=kind):
        if of == "image" and not is_table:
            yield folder.image_rows(request, group, stdin)
            continue
        for name in group:
            if is_table:
                yield tables.unlabeled_rows(replace(request, name=name), Path(name), of)
            else:
                _check_text(name)
                yield texts.line_rows(name, stdin)


def on_hub(request: DataRequest) -> bool:
    """Whether the data are a set of the hub."""
    return request.name.startswith(hub.PREFIX)


def _check_path(name: str, path: Path) -> None:
    """Raises UsageError if nothing is at a path, and DataError if it is not UTF-8."""
    if not exists(path):
        if any(separator in name for separator in SEPARATORS):
            if in_memory.is_folder(path):
                raise UsageError(
                    f"{name}, which had rows in memory, was removed; give the same rows again."
                )
            hint = f", or write hf:{name} for a set of the hub" if HUB_NAME.fullmatch(name) else ""
            raise UsageError(f"{name} does not exist; name a file or a folder that does{hint}.")
        more = ", and no such file exists (sets of the hub are hf:ORG/NAME)"
        raise unknown("data set", name, DATASETS, more)
    absolute = str(path.resolve())
    if spelled(absolute) != absolute:
        raise DataError(f"{spelled(absolute)}: {NOT_UTF8}.")


def _of_folder(request: DataRequest, path: Path) -> RawRows:
    """The rows of a folder that has no tables: images with masks, texts, or class folders."""
    inside = folder.Folder.walked(path)
    others = "detection" not in request.tasks and inside.has_masks
    if request.embeds == "image" and (captioned := caption_files.of_folder(request, inside)):
        return captioned
    if not others and (found := boxes.of_folder(request, inside)):
        return found
    if request.embeds == "image" and (captioned := caption_files.beside(request, inside)):
        return captioned
    if not inside.has_masks:
        refused.refuse_folder(request.name, inside)
    elif "segmentation" not in request.tasks and request.task is None:
        override = "give --task classification if its folders are classes"
        raise recognition.for_other_models(request, "images with masks", "segmentation", override)
    if "segmentation" in request.tasks and (pairs := folder.pairs(path)) is not None:
        return folder.mask_rows(request, path, pairs)
    if not inside.images and (files := _texts(request, path, inside.inside)):
        return texts.document_rows(request, path, files)
    if "classification" not in request.tasks:  # a folder has no other labels
        raise recognition.unserved(request)
    return folder.class_rows(request, path)  # raises for want of classes


def _texts(request: DataRequest, path: Path, inside: Iterable[Path]) -> texts.Files:
    """The texts of a folder without images; raises UsageError if it has more than texts.

    inside: this folder and all in it.
    """
    language, files = request.language, texts.in_folder(path)
    others = [name for name in texts.others(path) if not texts.is_about(Path(name))]
    if request.tasks[0] != language and texts.sorted_in(path, files):
        others = ["a folder of texts for each class"]
    if language and files and (request.task or not others):
        return files
    deeper = sorted(str(here) for here in inside if layout.in_folder(here))
    if deeper:
        raise UsageError(f"{request.name} has no tables itself; name {' or '.join(deeper[:3])}.")
    if language and files:
        raise UsageError(
            f"{request.name} has more than texts, {', '.join(others[:5])}; write a table, or learn "
            f"the texts alone with --task {language}."
        )
    return {}


def _files(name: str, modality: Modality) -> list[str]:
    """The tables of splits in a folder, or else its texts; for other names the name alone."""
    top = Path(name)
    if name == STDIN or not top.is_dir():
        return [name]
    every: Mapping[str, Sequence[Path]] = layout.in_folder(top)
    splits = {split: files for split, files in every.items() if role(split)}
    if not splits and modality == "text":
        splits = {**texts.in_folder(top)}
    return [str(file) for files in splits.values() for file in files] or [name]


def _looks(name: str, stdin: Iterable[str]) -> Modality:
    """Whether a file, a folder or the lines of STDIN are images or texts, by their names."""
    if name != STDIN:
        return "text" if texts.is_text(Path(name)) else "image"
    return "image" if all(Path(line).suffix.casefold() in SUFFIXES for line in stdin) else "text"


def _check_text(name: str) -> None:
    """Raises UsageError for a file whose name has no ending of texts."""
    file = Path(name)
    if file.suffix.casefold() in SUFFIXES:
        raise UsageError(f"{file} is an image, and the model takes texts; name files of texts.")
    if name != STDIN and not texts.is_text(file):
        kinds = ", ".join(suffix.removeprefix(".").upper() for suffix in layout.SUFFIXES)
        raise UsageError(
            f"{file} is not a text file; give {kinds}, or TXT with a text on each line."
        )
