"""Plain texts for language modelling: files of documents, and folders of them."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.data.own import lines
from razorctl.data.own.ask import Ask, role, split_of
from razorctl.data.own.columns import SUFFIXES as IMAGES
from razorctl.data.own.raw import Raw
from razorctl.data.own.store import packed, stored
from razorctl.folders import spelled
from razorctl.tasks import Task

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".txt", ".text", ".md")
GAP = 2  # empty lines in a row that end a document
Files = Mapping[str, Sequence[Path]]  # split as the data call it -> its files


def is_text(file: Path) -> bool:
    return file.suffix.casefold() in SUFFIXES and file.is_file()


def in_folder(folder: Path) -> Files:
    """Split -> its files: of the splits that files or folders are called, or else all as one.

    Empty if there are no texts, or images are among them.
    """
    every: list[Path] = []
    for here, inside, files in os.walk(folder):
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        every += [Path(here, name) for name in sorted(files) if not name.startswith(".")]
    if any(file.suffix.casefold() in IMAGES for file in every):
        return {}
    found: dict[str, list[Path]] = {}
    known = [file for file in every if is_text(file)]
    for file in known:
        found.setdefault(_split(folder, file), []).append(file)
    if "train" in map(role, found):
        return {split: files for split, files in found.items() if role(split)}
    return {folder.resolve().name: known} if known else {}


def _split(folder: Path, file: Path) -> str:
    inside = file.relative_to(folder).parts
    return spelled(inside[0] if len(inside) > 1 else split_of(file))


def read(ask: Ask, path: Path, files: Files, task: Task) -> Raw:
    """The documents of files.

    A file that is all of a split has documents with GAP empty lines between them; of several
    files each is a document. Raises UsageError if it is not clear which splits to use, and
    DataError, with the line, for a file that is not UTF-8.
    """
    import pyarrow as pa

    whole = len(files) == 1 and ask.split is None
    chosen = {"train": next(iter(files))} if whole else ask.splits(list(files))
    schema = pa.schema([("text", pa.large_string()), ("place", pa.string())])
    top = path if path.is_dir() else path.parent

    def batches(own: Sequence[Path]) -> Iterator["pa.RecordBatch"]:
        return packed((row for file in own for row in _documents(top, file, len(own) == 1)), schema)

    splits: dict[str, Any] = {}
    for split, part in chosen.items():
        own = files[part]
        splits[split] = stored(own, schema, partial(batches, own), len(own) == 1)
    told = "a document for each file"
    if any(len(files[part]) == 1 for part in chosen.values()):
        told = f"text, with {GAP} empty lines between documents"
    files_of = {split: files[called] for split, called in chosen.items()}
    called = {
        split: spelled(of[0].name) if len(of) == 1 else chosen[split]
        for split, of in files_of.items()
    }
    return Raw(ask.name, "text", splits, called, told, task=task)


def _documents(top: Path, file: Path, several: bool) -> Iterator[dict[str, str]]:
    """The documents of a file with their places; several: whether it may have more than one."""
    place = spelled(str(file.relative_to(top)))
    document: list[str] = []
    start, empty = 1, 0
    for number, line in enumerate(lines.decoded(file), 1):
        written = bool(line.strip())
        if written and several and empty >= GAP and document:
            yield {"text": _joined(document), "place": f"{place}, line {start}"}
            document = []
        if written and not document:
            start = number
        empty = 0 if written else empty + 1
        if written or document:
            document.append(line)
    if document or not several:
        yield {"text": _joined(document), "place": f"{place}, line {start}" if several else place}


def _joined(document: list[str]) -> str:
    """The lines of a document, with line breaks of Unix, and none at its end."""
    return "".join(document).replace("\r\n", "\n").replace("\r", "\n").rstrip()
