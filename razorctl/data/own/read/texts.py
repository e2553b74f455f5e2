"""Plain texts: files of documents for language modelling, folders of them, and files of lines."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from razorctl.config.tasks import Task
from razorctl.data.own.raw import RawRows, not_utf8, walk
from razorctl.data.own.read import layout
from razorctl.data.own.read.column import SAMPLE
from razorctl.data.own.read.lines import decoded, of_tokens
from razorctl.data.own.request import STDIN, DataRequest, role, split_of
from razorctl.data.own.store import batches_of, stored_rows, text_table
from razorctl.errors import DataError, UsageError
from razorctl.system.folders import shown, spelled

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".txt", ".text", ".md")
ROWS = {  # the sign of a table, for a sentence -> the pattern of all its lines, or of its header
    "its header": re.compile(r"\w+([,;|\t]\w+)+"),
    "an object of JSON on each line": re.compile(r"\{.*\}"),
    "a __label__ before each text": re.compile(r"__label__.*"),
    "tabs, ; or | in each line": re.compile(r".+[\t;|].+"),
    "a tag at each word": re.compile(r"[^\s/_]+[/_][^\s/_]+(\s+[^\s/_]+[/_][^\s/_]+)+"),
}
GAP = 2  # empty lines in a row that end a document
Files = Mapping[str, Sequence[Path]]  # split as the data call it -> its files


def is_text(file: Path) -> bool:
    return file.suffix.casefold() in SUFFIXES and file.is_file()


def in_folder(folder: Path) -> Files:
    """Split -> its text files, by names of files or folders; without such names one split has all.

    Empty if there are no texts.
    """
    splits: dict[str, list[Path]] = {}
    texts = [file for file in _files(folder) if is_text(file) and not is_about(file)]
    for file in texts:
        splits.setdefault(_split(folder, file), []).append(file)
    if "train" in map(role, splits):
        return {split: files for split, files in splits.items() if role(split)}
    return {folder.resolve().name: texts} if texts else {}


def others(folder: Path) -> list[str]:
    """The endings of files in a folder that are no texts, and the names of files about the data."""
    left = (file for file in _files(folder) if is_about(file) or not is_text(file))
    return sorted({file.name if is_about(file) else file.suffix or file.name for file in left})


def is_about(file: Path) -> bool:
    """Whether a file describes the data of a folder: a readme or a license."""
    return file.stem.casefold() in ("readme", "license")


def sorted_in(folder: Path, files: Files) -> bool:
    """Whether texts are in several folders that may be classes, as no split is called so."""
    inside = {file.parent for part in files.values() for file in part} - {folder}
    return sum(not role(here.name) for here in inside) > 1


def _files(folder: Path) -> Iterator[Path]:
    """The files in a folder, in order."""
    for here, inside, files in walk(folder):
        inside[:] = sorted(filter(shown, inside))
        yield from (Path(here, name) for name in sorted(filter(shown, files)))


def _refuse_rows(request: DataRequest, file: Path, task: Task) -> None:
    """Raises UsageError for a file whose first lines are rows of a table."""
    head = [line.strip() for line in islice(decoded(file), SAMPLE) if line.strip()]
    lines = {sign: head[:1] if sign == "its header" else head for sign in ROWS}
    signs = [sign for sign, row in ROWS.items() if all(map(row.fullmatch, lines[sign]))]
    firsts = Counter(re.split(r"[\s,:]", line, maxsplit=1)[0] for line in head)
    alike = 1 < len(firsts) <= len(head) // 4 and min(firsts.values()) > 1
    if alike and request.tasks[0] != task:  # for a language model, one word is no sign of a table
        signs.append(f"a word such as {min(firsts)} before each text")
    if signs and len(head) > 2:
        raise UsageError(
            f"{request.name} looks like a table, by {signs[0]}; call it .csv, .tsv or .jsonl, with "
            f"a name for each column, or learn its lines as texts with --task {task}."
        )


def _split(folder: Path, file: Path) -> str:
    inside = file.relative_to(folder).parts
    return spelled(inside[0] if len(inside) > 1 else split_of(file))


def of_file(request: DataRequest, path: Path) -> RawRows | None:
    """The documents of a text file for a language model; None of another path."""
    if request.language is None or not is_text(path) or layout.is_table(path):
        return None
    return document_rows(request, path, {path.stem: [path]})


def document_rows(request: DataRequest, path: Path, files: Files) -> RawRows:
    """The documents of files, for the language task of a request.

    A split of one file has documents with GAP empty lines between them. In a split of several files
    each file is a document. Raises UsageError if it is not clear which splits to use, or if the
    files may be tokens with tags, and DataError, with the line, for a file that is not UTF-8.

    path: the file or the folder of the request.
    """
    import pyarrow as pa

    task = request.language
    assert task is not None

    first = next(iter(files.values()))[0]
    if request.task is None and of_tokens(first, sure=False) is not None:
        raise UsageError(
            f"{first} looks like tokens with a tag each; choose with --task "
            f"token-classification or --task {task}."
        )
    chosen = request.splits(list(files), single=True)
    schema = pa.schema([("text", pa.large_string()), ("place", pa.string())])
    top = path if path.is_dir() else path.parent
    if request.task is None and len(files[chosen["train"]]) == 1:
        _refuse_rows(request, files[chosen["train"]][0], task)

    def batches(part: Sequence[Path]) -> Iterator["pa.RecordBatch"]:
        several = len(part) == 1
        return batches_of((row for file in part for row in _documents(top, file, several)), schema)

    splits, names, details = {}, {}, "a document for each file"
    for split, name in chosen.items():
        part = files[name]
        splits[split] = stored_rows(part, schema, partial(batches, part), len(part) == 1)
        names[split] = spelled(part[0].name) if len(part) == 1 else name
        if len(part) == 1:
            details = f"text, with {GAP} empty lines between documents"
    if path.is_dir() and (left := others(path)):
        details += f", without its {', '.join(left)}"
    return RawRows(request.name, splits, names, details, task=task)


def line_rows(name: str, stdin: Iterable[str]) -> RawRows:
    """The lines of a text file or of standard input, each a text; blank ones do not count.

    Raises DataError for a file that is not UTF-8.
    """
    lines, source = stdin, "stdin"
    if name != STDIN:
        source = name
        try:
            lines = Path(name).read_text("utf-8-sig").splitlines()
        except UnicodeDecodeError:
            raise DataError(f"{name} is not UTF-8; save it as UTF-8.") from None
    rows = (
        {
            "text": spelled(line),
            "place": spelled(f"{source}, line {number}"),
            "fault": not_utf8(line),
        }
        for number, line in enumerate(lines, 1)
    )
    table = text_table(rows, "text", "place", "fault")
    return RawRows(name, {"test": table}, {"test": name}, "", blanks=True)


def _documents(top: Path, file: Path, several: bool) -> Iterator[dict[str, str]]:
    """The documents of a file with their places; several: whether empty lines separate them."""
    place = spelled(str(file.relative_to(top)))
    document: list[str] = []
    start, empty = 1, 0
    for number, line in enumerate(decoded(file), 1):
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
    """The lines of a document as one text, with line breaks of Unix and none at its end."""
    return "".join(document).replace("\r\n", "\n").replace("\r", "\n").rstrip()
