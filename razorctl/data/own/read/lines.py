"""Rows of CSV, TSV and JSON Lines files, with the lines that they are on."""

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from razorctl import units
from razorctl.data.own import chats
from razorctl.data.own.fields import field_of, worse
from razorctl.data.own.labels import halved, label_text
from razorctl.data.own.raw import Fault, refusal
from razorctl.data.own.read import tagged
from razorctl.data.own.read.column import SAMPLE, Columns, columns_of
from razorctl.data.own.read.dialects import dialect
from razorctl.data.own.read.table_columns import TableColumns
from razorctl.data.own.store import batches_of
from razorctl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

OF_FILE = "-DOCSTART-"  # begins a line before a text
COMMENT = re.compile(r"#\s*(\w+\s*=|id\s)")  # before a sentence, as of CoNLL-U
UNSAID = (".txt", ".text", ".tsv")  # endings of files that may be CoNLL
LOOKED_AT = 200  # lines of such a file, and sentences of one that is
# A sentence of WikiNER.
TAGGED_LINE = re.compile(r"(?:[^\s|]+\|[^\s|]+\|(?:O|[BI]-\w+)\s*)+")
# What Python writes as JSON, though JSON has it not; NaN is no value.
CONSTANTS = {"NaN": None, "Infinity": math.inf, "-Infinity": -math.inf}
ESCAPED = re.compile(r"\\u[dD]")  # a lone surrogate


class Line(NamedTuple):
    """A row, the number of its first line, and its fault if it cannot be read.

    unit: the word for what `number` counts: lines, or objects of a JSON array.
    """

    number: int
    values: Mapping[str, Any]
    fault: str | None = None
    unit: str = "line"


def decoded(file: Path) -> Iterator[str]:
    """The lines of a file; raises DataError, with the line, for one that is not UTF-8."""
    with file.open("rb") as lines:
        for number, line in enumerate(_ended(lines), 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise DataError(
                    f"{file} is not UTF-8 in line {number}; save it as UTF-8."
                ) from None


def _ended(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Lines that end with LF, cut also after a CR alone, the line break of old Macs."""
    for line in lines:
        yield from re.split(rb"(?<=\r)(?!\n|$)", line) if b"\r" in line else (line,)


def _split(file: Path) -> Iterator[tuple[int, list[str]]]:
    """The first line and the fields of each row; the first row is the header."""
    detected = dialect(file, partial(decoded, file))
    reader = detected.rows(decoded(file))
    begin = 1
    try:
        for fields in reader:
            empty = len(fields) == 1 and fields[0].isspace()  # a line of white space
            if fields and not empty and not (detected.declared and begin == 1):
                yield begin, fields
            begin = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{file} cannot be read from line {begin} on ({error}); correct its quotes."
        ) from None


def delimited(file: Path) -> Iterator[Line]:
    """The rows of a CSV or TSV file; raises DataError if it cannot be read."""
    rows = _split(file)
    _, header = next(rows, (1, []))
    if not header:
        raise DataError(f"{file} is empty; give a file with a header and rows.")
    if twice := [column for column in header if column and header.count(column) > 1]:
        raise DataError(f"{file} has two columns named {twice[0]}; rename one.")
    for number, fields in rows:
        values = dict(zip(header, fields, strict=False))
        ragged = len(fields) != len(header)
        fault = f"{units.count(len(fields), 'field')}, not {len(header)}" if ragged else None
        yield Line(number, values, fault)


def json_lines(file: Path) -> Iterator[Line]:
    """The rows of a file with a JSON object on each line; raises DataError if it is not UTF-8."""
    for number, line in enumerate(decoded(file), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line, parse_constant=CONSTANTS.get)
        except (ValueError, RecursionError):
            yield Line(number, {}, "not JSON")
            continue
        yield _json_row(number, values, line)


def _json_row(number: int, values: Any, text: str, unit: str = "line") -> Line:
    """The row of a JSON value, with its fault. text: the JSON that has it."""
    if isinstance(values, list) and [*map(type, values)] == [str, dict]:  # as of spaCy
        values = {"text": values[0], **values[1]}
    if not isinstance(values, dict):
        return Line(number, {}, "no object", unit)
    if ESCAPED.search(text) and (fault := halved(values)):
        return Line(number, {}, fault, unit)
    return Line(number, values, None, unit)


def has_json_rows(file: Path) -> bool:
    """Whether a JSON file is an array, or has a JSON object on each line."""
    with file.open("rb") as lines:
        first = next((line for line in lines if line.strip(b"\xef\xbb\xbf \t\r\n")), b"")
        more = any(line.strip() for line in lines)
    start = first.removeprefix(b"\xef\xbb\xbf").strip()
    return start.startswith(b"[") or (more and start.startswith(b"{") and start.endswith(b"}"))


def json_rows(file: Path) -> Iterator[Line]:
    """The rows of a JSON array, or of a file with an object on each line.

    Raises DataError for a file that is not UTF-8, and for an array that cannot be read.
    """
    text = "".join(decoded(file))
    if not text.lstrip(" \t\r\n").startswith("["):
        yield from json_lines(file)
        return
    try:
        rows = json.loads(text, parse_constant=CONSTANTS.get)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise DataError(
                f"{file} has text after its JSON array; write one array, or JSONL."
            ) from None
        line, reason = error.lineno, error.msg
        raise DataError(f"{file} is not JSON in line {line} ({reason}); correct it.") from None
    except RecursionError:
        raise DataError(f"{file} is nested too deeply for JSON; correct it.") from None
    for number, values in enumerate(rows, 1):
        yield _json_row(number, values, text, "object")


def conll(file: Path) -> Iterator[Line]:
    """The sentences of a CoNLL file: a token and its tags on each line, empty lines between them.

    Columns are separated by tabs or spaces, and called by their numbers from 1 on. A first column
    that numbers the tokens is left out, with the lines that it does not number, such as 1-2. Raises
    DataError if the file is not UTF-8.
    """
    with file.open("rb") as binary:
        shape = _shape(
            line.decode("utf-8-sig", "replace") for line in islice(_ended(binary), LOOKED_AT)
        )
    peeked = [[row[0] for row in rows] for _, rows in islice(_sentences(file, shape), LOOKED_AT)]
    counted = shape[0] > 1 and tagged.counts(peeked)
    for begin, every in _sentences(file, shape):
        rows = [row for row in every if not (counted and tagged.RANGE.fullmatch(row[0]))]
        widths = {shape[0], *map(len, rows)}
        odd = f"lines of {min(widths)} and {max(widths)} columns" if len(widths) > 1 else None
        numbered = enumerate(zip(*rows, strict=False), 1)
        yield Line(begin, {str(n): [*of] for n, of in numbered if n > counted}, odd)


def _shape(lines: Iterable[str]) -> tuple[int, bool, str]:
    """The number of columns of a CoNLL file, whether tabs separate them, its header or OF_FILE."""
    plain = [line for line in lines if line[:1] != "#" and line.strip()]
    shapes = Counter((len(_fields(line)), "\t" in line) for line in plain)
    shape = max(shapes, key=shapes.__getitem__, default=(1, False))
    named = tagged.has_header([row for line in plain if len(row := _fields(line)) == shape[0]])
    return *shape, plain[0] if named else OF_FILE


def _sentences(file: Path, shape: tuple[int, bool, str]) -> Iterator[tuple[int, list[list[str]]]]:
    """The first line of each sentence of a CoNLL file, and the columns of its lines."""
    rows: list[list[str]] = []
    begin = 1
    for number, line in enumerate(chain(decoded(file), [""]), 1):
        fields = _fields(line)
        if fields and (rows or not _is_no_token(line, shape)):
            begin = begin if rows else number
            rows.append(fields)
        elif rows and not fields:
            yield begin, rows
            rows = []


def _fields(line: str) -> list[str]:
    """The columns of a line of CoNLL; none for white space. A token may be a no-break space."""
    line = line.rstrip(" \t\r\n")
    return [field for field in re.split("\t" if "\t" in line else " ", line) if field.strip(" ")]


def _is_no_token(line: str, shape: tuple[int, bool, str]) -> bool:
    """Whether the first line of a sentence of CoNLL is a comment or a header, and no token."""
    other = line[0] == "#" and (len(_fields(line)), "\t" in line) != shape[:2]
    return line.startswith((OF_FILE, shape[2])) or other or COMMENT.match(line) is not None


def tagged_lines(file: Path) -> Iterator[Line]:
    """The sentences of a file like WikiNER's, one on each line: tokens as token|part|tag."""
    for number, line in enumerate(decoded(file), 1):
        if line.strip():
            parts = [token.rsplit("|", 2) for token in line.split()]
            odd = next(("|".join(part) for part in parts if len(part) < 3), None)
            fault = None if odd is None else f"{odd!r} is not token|part|tag"
            yield Line(
                number, {"tokens": [p[0] for p in parts], "tags": [p[-1] for p in parts]}, fault
            )


def of_tokens(file: Path, sure: bool = True) -> Callable[[Path], Iterator[Line]] | None:
    """The reader of a text file whose first lines are tokens with a tag each; None for others.

    Such files are often called train.txt, or train.tsv without having a header. CoNLL-U is
    recognized by its columns. sure: whether tags must be tags of entities.
    """
    if file.suffix.casefold() not in UNSAID or not file.is_file():
        return None
    with file.open("rb") as binary:
        first = [line.decode("utf-8-sig", "replace") for line in islice(_ended(binary), LOOKED_AT)]
    width, *_ = shape = _shape(first)
    written = [line for line in first if line.strip() and not _is_no_token(line, shape)]
    if written and all(TAGGED_LINE.fullmatch(line.strip()) for line in written):
        return tagged_lines
    rows = [_fields(line) for line in first if not (line.strip() and _is_no_token(line, shape))]
    if width < 2 or {len(row) for row in rows if row} != {width}:
        return None
    universal = width == 1 + len(tagged.UNIVERSAL) and rows[0][0] in ("1", "1-2")
    return conll if universal or tagged.look_tagged(rows, sure) else None


READERS: dict[str, Callable[[Path], Iterator[Line]]] = {
    ".csv": delimited,
    ".tsv": delimited,
    ".jsonl": json_lines,
    ".json": json_rows,
    **dict.fromkeys((".conll", ".conllu", ".bio", ".iob", ".iob2", ".bioes", ".bmes"), conll),
}


def lines_of(file: Path) -> Iterator[Line]:
    """The rows of a file by its kind."""
    return (of_tokens(file) or READERS.get(file.suffix.casefold(), conll))(file)


@dataclass(frozen=True)
class LineFile:
    """A table whose values are texts or JSON; it names no classes."""

    path: Path

    @cached_property
    def columns(self) -> Columns:
        """The columns of the first rows; raises DataError if there are none."""
        bad: list[Line] = []
        rows: list[Line] = []
        for line in lines_of(self.path):
            (bad if line.fault else rows).append(line)
            if len(rows) == SAMPLE:
                break
        names = list(dict.fromkeys(name for row in rows for name in row.values if name))
        if not names and bad:
            faults = [Fault(self._place(line), str(line.fault)) for line in bad]
            raise refusal(str(self.path), faults, len(bad))
        if not names:
            raise DataError(f"{self.path} has no rows that can be read; give a file with rows.")
        values = {name: [row.values.get(name) for row in rows] for name in names}
        return columns_of(values, {}, self.path.parent)

    @property
    def names(self) -> list[str]:
        """The names of all columns, also of those that only later rows have."""
        return list(dict.fromkeys(name for row in self.rows() for name in row))

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """All rows as they are, bad ones included."""
        return (line.values for line in lines_of(self.path))

    def class_names(self, label: str | None) -> None:
        return None

    def schema(self, columns: TableColumns) -> "pa.Schema":
        """The columns of `RawRows`; labels are texts."""
        import pyarrow as pa

        names = [*columns.fields, "place", "fault"]
        kinds = [(name, field_of(name)) for name in names]
        return pa.schema([(name, of.kind() if of else pa.string()) for name, of in kinds])

    def batches(self, columns: TableColumns, schema: "pa.Schema") -> Iterator["pa.RecordBatch"]:
        """The rows as `RawRows` has them; raises DataError for labels of several types."""
        return batches_of(self._records(columns), schema)

    def _place(self, line: Line) -> str:
        return f"{self.path.name}, {line.unit} {line.number}"

    def _records(self, columns: TableColumns) -> Iterator[dict[str, Any]]:
        kinds: dict[str, str] = {}
        parts = {role: name for name, role in columns.renamed.items() if role in chats.PARTS}
        for line in lines_of(self.path):
            place = self._place(line)
            row: dict[str, Any] = {"place": place, "fault": line.fault}
            if parts:
                said = {role: line.values.get(name) for role, name in parts.items()}
                row["messages"], fault = chats.of_line(said)
                row["fault"] = worse(row["fault"], fault)
            for name, role in columns.renamed.items():
                value = line.values.get(name)
                if role in parts:
                    continue
                if role == "label":
                    row[role] = None if line.fault else label_text(value, place, kinds)
                elif (field := field_of(role)) is None:  # the split
                    row[role] = value if isinstance(value, str) else None
                else:
                    row[role], fault = field.of_line(value, name, self.path.parent)
                    row["fault"] = worse(row["fault"], fault)
            yield row
