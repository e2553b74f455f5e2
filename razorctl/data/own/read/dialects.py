"""How the rows of delimited text are written, by their lines: delimiter, quotes and spaces."""

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

LOOKED_AT = 200  # lines
SAID = re.compile(r"\ufeff?\"?sep=(.)\"?\s*")  # the first line of spreadsheets
LONGEST = 2**31 - 1  # characters of a field; the limit of `csv` is shorter than some texts


class Dialect(NamedTuple):
    """said: whether the first line is no row, as it says the delimiter. quote: None if none is."""

    delimiter: str
    quote: str | None = '"'
    spaces: bool = False  # whether a space follows the delimiter, which is no part of a field
    said: bool = False

    def rows(self, lines: Iterable[str]) -> Any:
        """The `csv.reader` of lines, which raises csv.Error for quotes that do not pair."""
        csv.field_size_limit(LONGEST)
        return csv.reader(
            lines,
            delimiter=self.delimiter,
            quotechar=self.quote,
            quoting=csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE,
            skipinitialspace=self.spaces,
            strict=True,
        )


def dialect(file: Path, lines: Callable[[], Iterable[str]]) -> Dialect:
    """The dialect of a CSV or TSV file; lines: returns its lines, as often as it is called.

    Quotes of a tab-separated file are letters, unless they pair in all of its rows.
    """
    head = [line for line in islice(lines(), LOOKED_AT) if line.strip()]
    said = SAID.fullmatch(head[0]) if head else None
    if said is not None:
        del head[0]
    delimiter = said[1] if said else _delimiter(file, head[0] if head else "")
    plain = Dialect(delimiter, said=said is not None)
    if delimiter == "\t":
        return plain if _pair(plain, lines()) else plain._replace(quote=None)
    if len(head) > 1 and all(_quoted_once(delimiter).search(line) for line in head[1:]):
        plain = plain._replace(quote="'")
    return plain._replace(spaces=_spaced(delimiter, head))


def _delimiter(file: Path, header: str) -> str:
    """The delimiter in the header: that of the ending, or else another that is written."""
    usual = "\t" if file.suffix.casefold() == ".tsv" else ","
    return next((other for other in (usual, *";\t,|") if other in header), usual)


def _pair(dialect: Dialect, lines: Iterable[str]) -> bool:
    """Whether all rows have the fields of the header if quotes are quotes, and none has another."""
    rows = (row for row in dialect.rows(lines) if "".join(row).strip())
    try:
        width = len(next(islice(rows, dialect.said, None), ()))
        return all(len(row) == width and not _swallows(row) for row in rows)
    except csv.Error:
        return False


def _swallows(row: Sequence[str]) -> bool:
    """Whether a field ranges over lines of which the first and the last are rows themselves."""
    lines = ((at, field.split("\n")) for at, field in enumerate(row) if "\n" in field)
    tabs = len(row) - 1
    return any(at + of[0].count("\t") == tabs == of[-1].count("\t") + tabs - at for at, of in lines)


def _quoted_once(delimiter: str) -> re.Pattern[str]:
    """A line with a field in single quotes."""
    at = re.escape(delimiter)
    return re.compile(rf"(?:^|{at})\s*'(?:[^']|'')*'\s*(?:{at}|$)")


def _spaced(delimiter: str, head: Sequence[str]) -> bool:
    """Whether a space follows each delimiter of the header, or one comes before a quote."""
    spaces = head[0].count(f"{delimiter} ") if head else 0
    if spaces and spaces == head[0].count(delimiter):
        return True
    fields = (field for row in csv.reader(head, delimiter=delimiter) for field in row)
    return any(field[:1] == " " and field.lstrip()[:1] == '"' for field in fields)
