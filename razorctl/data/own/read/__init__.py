"""The rows that a path or a name on the hub stands for: a file for each kind of data."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from razorctl.data.catalog import DATASETS
from razorctl.data.own.raw import NOT_UTF8, RawRows
from razorctl.data.own.read import folder, hub, layout, lines, refused, sample, tables, texts
from razorctl.data.own.request import STDIN, DataRequest, role
from razorctl.errors import DataError, UsageError, raise_lack
from razorctl.models import Modality
from razorctl.registry import unknown
from razorctl.system.folders import exists, spelled

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # ORG/NAME
SEPARATORS = tuple(filter(None, (os.sep, os.altsep)))


def raw(request: DataRequest) -> RawRows:
    """The rows of the data that are named, read as a whole; raises what `own.find` raises."""
    return hub.raw(request) if on_hub(request) else _read_path(request)


def unlabeled(
    request: DataRequest, names: Iterable[str], modality: Modality, stdin: Iterable[str]
) -> Iterator[RawRows]:
    """The rows without labels of each table and text file, and of images that follow each other.

    They are the test split of each `RawRows`. Raises UsageError for files of another kind, and
    DataError for files that cannot be read and folders without any.

    Args:
        request: what is asked of the data.
        names: files, folders, and STDIN.
        modality: what the model takes.
        stdin: the lines of standard input.
    """
    files = [file for name in names for file in _files(name, modality)]
    for is_table, group in groupby(files, key=lambda name: layout.is_table(Path(name))):
        if is_table:
            for name in group:
                one = replace(request, name=name)
                yield tables.raw(one, tables.without_labels(one, Path(name), modality))
        elif modality == "image":
            yield folder.images_of(request, group, stdin)
        else:
            for name in group:
                _check_text(name)
                yield texts.lines_of(name, stdin)


def on_hub(request: DataRequest) -> bool:
    """Whether the data are a set of the hub."""
    return request.name.startswith(hub.PREFIX)


def _read_path(request: DataRequest) -> RawRows:
    """The rows of the file or the folder that is named."""
    name, path = request.name, Path(request.name).expanduser()
    if not exists(path):
        if any(separator in name for separator in SEPARATORS):
            hint = f", or write hf:{name} for a set of the hub" if HUB_NAME.fullmatch(name) else ""
            raise UsageError(f"{name} does not exist; name a file or a folder that does{hint}.")
        more = ", and no such file exists (sets of the hub are hf:ORG/NAME)"
        raise unknown("data set", name, DATASETS, more)
    absolute = str(path.resolve())
    if spelled(absolute) != absolute:
        raise DataError(f"{spelled(absolute)}: {NOT_UTF8}.")
    try:
        return _raw(request, path)
    except OSError as error:
        raise_lack(error)
        reason = error.strerror or str(error)
        raise DataError(
            f"{error.filename or name} cannot be read ({reason}); correct that."
        ) from None


def _raw(request: DataRequest, path: Path) -> RawRows:
    language = request.language
    if language is not None and texts.is_text(path) and not layout.is_table(path):
        return texts.raw(request, path, {path.stem: [path]}, language)
    table = _tables(request, path)
    if table is not None:
        return tables.raw(request, table)
    inside = folder.Folder.walked(path)
    refused.refuse_folder(request, inside)
    if "segmentation" in request.tasks and (pairs := folder.pairs(path)) is not None:
        return folder.raw_masks(request, path, pairs)
    if not inside.images:
        return _texts(request, path, inside.inside)
    if "classification" not in request.tasks:  # a folder has no other labels
        raise refused.unserved(request)
    return folder.raw(request, path)


def _texts(request: DataRequest, path: Path, inside: Iterable[Path]) -> RawRows:
    """The texts of a folder without images; raises UsageError if it has more than these.

    inside: this folder and all in it.
    """
    language, files = request.language, texts.in_folder(path)
    others = [name for name in texts.others(path) if not texts.is_about(Path(name))]
    if request.tasks[0] != language and texts.sorted_in(path, files):
        others = ["a folder of texts for each class"]
    if language is not None and files and (request.task or not others):
        return texts.raw(request, path, files, language)
    deeper = sorted(str(here) for here in inside if layout.in_folder(here))
    if deeper:
        raise UsageError(f"{request.name} has no tables itself; name {' or '.join(deeper[:3])}.")
    if language is not None and files:
        raise UsageError(
            f"{request.name} has more than texts, {', '.join(others[:5])}; write a table, or learn "
            f"the texts alone with --task {language}."
        )
    if "classification" not in request.tasks:
        raise refused.unserved(request)
    return folder.raw(request, path)  # which says what it lacks


def _tables(request: DataRequest, path: Path) -> tables.Tables | None:
    """The tables at a path; None if it is a folder without tables."""
    name, tagged = request.name, request.task == "token-classification"
    if path.is_dir():
        files = layout.in_folder(path, tagged)
        return tables.find(request, files) if files else None
    if path.suffix.casefold() in folder.ARCHIVES:
        what = "file" if path.with_suffix("").suffix not in ("", ".tar") else "folder"
        raise DataError(f"{name} is an archive; unpack it, and name the {what}.")
    if path.suffix.casefold() == ".json" and not lines.has_json_rows(path):
        raise refused.refuse_document(request, path)
    if not layout.is_table(path, tagged):
        documents = texts.SUFFIXES if request.language is not None else ()
        kinds = ", ".join(s.removeprefix(".").upper() for s in (*documents, *layout.SUFFIXES))
        raise UsageError(f"{name} is no table of a known kind; give {kinds} or a folder of images.")
    return tables.find(request, {path.stem: [path]}, single=True)


def _files(name: str, modality: Modality) -> list[str]:
    """The tables of splits in a folder, as for training, or else its texts; or the name alone."""
    top = Path(name)
    if name == STDIN or not top.is_dir():
        return [name]
    every: Mapping[str, Sequence[Path]] = layout.in_folder(top)
    splits = {split: files for split, files in every.items() if role(split)}
    if not splits and modality == "text":
        splits = {**texts.in_folder(top)}
    return [str(file) for files in splits.values() for file in files] or [name]


def _check_text(name: str) -> None:
    """Raises UsageError for a file that has no texts by its name."""
    file = Path(name)
    if file.suffix.casefold() in sample.SUFFIXES:
        raise UsageError(f"{file} is an image, and the model takes texts; name files of texts.")
    if name != STDIN and not texts.is_text(file):
        kinds = ", ".join(suffix.removeprefix(".").upper() for suffix in layout.SUFFIXES)
        raise UsageError(
            f"{file} is no file of texts; give {kinds}, or TXT with a text on each line."
        )
