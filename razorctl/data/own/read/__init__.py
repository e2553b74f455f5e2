"""The rows that a path or a name on the hub stands for: a file for each kind of data."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from razorctl.data.catalog import DATASETS
from razorctl.data.own.ask import STDIN, Ask, role
from razorctl.data.own.raw import NOT_UTF8, Raw
from razorctl.data.own.read import folder, hub, layout, lines, recognition, sample, tables, texts
from razorctl.errors import DataError, UsageError, raise_lack
from razorctl.models import Modality
from razorctl.registry import unknown
from razorctl.system.folders import exists, spelled

HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # ORG/NAME
SEPARATORS = tuple(filter(None, (os.sep, os.altsep)))


def raw(ask: Ask) -> Raw:
    """The rows of the data that are named, read as a whole; raises what `own.find` raises."""
    return hub.raw(ask) if on_hub(ask) else _read_path(ask)


def unlabeled(
    ask: Ask, names: Iterable[str], modality: Modality, stdin: Iterable[str]
) -> Iterator[Raw]:
    """The rows without labels of each table and text file, and of images that follow each other.

    They are the test split of each `Raw`. Raises UsageError for files of another kind, and
    DataError for files that cannot be read and folders without any.

    Args:
        ask: what is asked of the data.
        names: files, folders, and STDIN.
        modality: what the model takes.
        stdin: the lines of standard input.
    """
    files = [file for name in names for file in _files(name, modality)]
    for is_table, group in groupby(files, key=lambda name: layout.is_table(Path(name))):
        if is_table:
            for name in group:
                yield tables.unlabeled(replace(ask, name=name), Path(name), modality)
        elif modality == "image":
            yield folder.unlabeled(ask, group, stdin)
        else:
            for name in group:
                _check_text(name)
                yield texts.unlabeled(name, stdin)


def on_hub(ask: Ask) -> bool:
    """Whether the data are a set of the hub."""
    return ask.name.startswith(hub.PREFIX)


def _read_path(ask: Ask) -> Raw:
    """The rows of the file or the folder that is named."""
    name, path = ask.name, Path(ask.name).expanduser()
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
        return _raw(ask, path)
    except OSError as error:
        raise_lack(error)
        reason = error.strerror or str(error)
        raise DataError(
            f"{error.filename or name} cannot be read ({reason}); correct that."
        ) from None


def _raw(ask: Ask, path: Path) -> Raw:
    language = ask.language
    if language is not None and texts.is_text(path) and not layout.is_table(path):
        return texts.raw(ask, path, {path.stem: [path]}, language)
    table = _tables(ask, path)
    if table is not None:
        return tables.raw(ask, table)
    inside = folder.Folder.walked(path)
    folder.refuse_kinds(ask, inside)
    if "segmentation" in ask.tasks and (pairs := folder.pairs(path)) is not None:
        return folder.raw_masks(ask, path, pairs)
    if not inside.images:
        return _texts(ask, path, inside.inside)
    if "classification" not in ask.tasks:  # a folder has no other labels
        raise recognition.unserved(ask)
    return folder.raw(ask, path)


def _texts(ask: Ask, path: Path, inside: Iterable[Path]) -> Raw:
    """The texts of a folder without images; raises UsageError if it has more than these.

    inside: this folder and all in it.
    """
    language, files = ask.language, texts.in_folder(path)
    others = [name for name in texts.others(path) if not texts.is_about(Path(name))]
    if ask.tasks[0] != language and texts.sorted_in(path, files):
        others = ["a folder of texts for each class"]
    if language is not None and files and (ask.task or not others):
        return texts.raw(ask, path, files, language)
    deeper = sorted(str(here) for here in inside if layout.in_folder(here))
    if deeper:
        raise UsageError(f"{ask.name} has no tables itself; name {' or '.join(deeper[:3])}.")
    if language is not None and files:
        raise UsageError(
            f"{ask.name} has more than texts, {', '.join(others[:5])}; write a table, or learn the "
            f"texts alone with --task {language}."
        )
    if "classification" not in ask.tasks:
        raise recognition.unserved(ask)
    return folder.raw(ask, path)  # which says what it lacks


def _tables(ask: Ask, path: Path) -> tables.Tables | None:
    """The tables at a path; None if it is a folder without tables."""
    name, tagged = ask.name, ask.task == "token-classification"
    if path.is_dir():
        files = layout.in_folder(path, tagged)
        return tables.find(ask, files) if files else None
    if path.suffix.casefold() in folder.ARCHIVES:
        what = "file" if path.with_suffix("").suffix not in ("", ".tar") else "folder"
        raise DataError(f"{name} is an archive; unpack it, and name the {what}.")
    if path.suffix.casefold() == ".json" and not lines.has_json_rows(path):
        raise recognition.refuse_document(ask, path)
    if not layout.is_table(path, tagged):
        documents = texts.SUFFIXES if ask.language is not None else ()
        kinds = ", ".join(s.removeprefix(".").upper() for s in (*documents, *layout.SUFFIXES))
        raise UsageError(f"{name} is no table of a known kind; give {kinds} or a folder of images.")
    return tables.find(ask, {path.stem: [path]}, single=True)


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
