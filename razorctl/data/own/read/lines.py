"""Rows of CSV, TSV and JSON Lines files, with the lines that they are on."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from razorctl import units
from razorctl.data.own.fields import field_of, worse
from razorctl.data.own.labels import label_text
from razorctl.data.own.read.columns import TableColumns
from razorctl.data.own.read.sample import SAMPLE, Sample
from razorctl.data.own.store import BATCH, packed, stored
from razorctl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

LONGEST = 2**31 - 1  # characters of a field


class Line(NamedTuple):
    """A row, the line on which it begins, and what is wrong if it cannot be read."""

    number: int
    values: Mapping[str, Any]
    fault: str | None = None


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
    """Lines that end with LF, cut after each CR too that is no part of a CRLF, as of old Macs."""
    for line in lines:
        yield from re.split(rb"(?<=\r)(?!\n|$)", line) if b"\r" in line else (line,)


def _split(file: Path) -> Iterator[tuple[int, list[str]]]:
    """The lines on which rows begin and their fields; the first row is the header."""
    first = next(decoded(file), "")
    comma = "\t" if file.suffix.casefold() == ".tsv" else ","
    if comma not in first:
        # Spreadsheets of some countries write semicolons.
        comma = next((other for other in ";\t" if other in first), comma)
    csv.field_size_limit(LONGEST)  # the library's own limit is shorter than some texts
    reader = csv.reader(decoded(file), delimiter=comma, strict=True)
    begin = 1
    try:
        for fields in reader:
            empty = len(fields) == 1 and fields[0].isspace()  # a line of white space
            if fields and not empty:
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
            values = json.loads(line)
            if "\\ud" in line.casefold():
                json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            yield Line(number, {}, "half a character: a lone surrogate")
            continue
        except (ValueError, RecursionError):
            yield Line(number, {}, "not JSON")
            continue
        yield Line(number, values) if isinstance(values, dict) else Line(number, {}, "no object")


READERS: dict[str, Callable[[Path], Iterator[Line]]] = {
    ".csv": delimited,
    ".tsv": delimited,
    ".jsonl": json_lines,
}


def sample(file: Path) -> Sample:
    """The first rows of a file; raises DataError if there are none."""
    rows = [
        line for line in islice(READERS[file.suffix.casefold()](file), SAMPLE) if not line.fault
    ]
    names = list(dict.fromkeys(name for row in rows for name in row.values if name))
    if not names:
        raise DataError(f"{file} has no rows that can be read; give a file with rows.")
    values = {name: [row.values.get(name) for row in rows] for name in names}
    return Sample(values, root=file.parent)


def schema(columns: TableColumns) -> "pa.Schema":
    """The columns of `Raw`; labels are texts."""
    import pyarrow as pa

    names = [*columns.renamed.values(), "place", "fault"]
    kinds = [(name, field_of(name)) for name in names]
    return pa.schema([(name, of.kind() if of else pa.string()) for name, of in kinds])


def rows(files: Sequence[Path], columns: TableColumns) -> "Dataset":
    """The rows of files with the columns of `Raw`; raises DataError for labels of several types."""
    kinds = schema(columns)
    every = (row for file in files for row in records(file, columns))
    return stored(files, kinds, lambda: packed(every, kinds), columns)


def labels(file: Path, columns: TableColumns) -> "pa.ChunkedArray":
    """The labels of a file."""
    import pyarrow as pa

    values = (row["label"] for row in records(file, columns))
    chunks = iter(lambda: list(islice(values, BATCH)), [])
    return pa.chunked_array((pa.array(chunk, pa.string()) for chunk in chunks), pa.string())


def class_names(file: Path, columns: TableColumns) -> None:
    """None: the type of a label names no classes."""


def records(file: Path, columns: TableColumns) -> Iterator[dict[str, Any]]:
    """The rows of one file as of `rows`, one at a time; image paths are relative to its folder."""
    kinds: dict[str, str] = {}
    renamed = columns.renamed
    for line in READERS[file.suffix.casefold()](file):
        place = f"{file.name}, line {line.number}"
        row: dict[str, Any] = {"place": place, "fault": line.fault}
        for column, name in renamed.items():
            value = line.values.get(column)
            if name == "label":
                row[name] = label_text(value, place, kinds)
            else:
                field = field_of(name)
                assert field is not None
                row[name], fault = field.of_line(value, column, file.parent)
                if fault is not None:
                    row["fault"] = worse(row["fault"], fault)
        yield row
