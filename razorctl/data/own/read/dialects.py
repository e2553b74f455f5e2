"""The dialect of delimited text, detected from its lines: delimiter, quotes and spaces."""

import csv
import re
from collections.abc import Callable, Iterable
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

LOOKED_AT = 200  # lines
DECLARED = re.compile(r"\"?sep=(.)\"?\s*")  # the first line of spreadsheets
PAIRED = re.compile(r'"[^"]*(?:""[^"]*)*"')  # a field in quotes
LONGEST = 2**31 - 1  # characters of a field; the limit of `csv` is shorter than some texts


class Dialect(NamedTuple):
    """The way that rows are written.

    declared: whether the first line is `sep=` with the delimiter. quote: None if quotes are plain
    letters. spaces: whether a space after each delimiter is no part of the field.
    """

    delimiter: str
    declared: bool
    quote: str | None = '"'
    spaces: bool = False

    def rows(self, lines: Iterable[str]) -> Any:
        """The `csv.reader` of lines, which raises csv.Error for quotes that do not pair."""
        form: Any = {"delimiter": self.delimiter, "quotechar": self.quote, "strict": True}
        form["quoting"] = csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE
        return csv.reader(lines, skipinitialspace=self.spaces, **form)


def dialect(file: Path, lines: Callable[[], Iterable[str]]) -> Dialect:
    """The dialect of a CSV or TSV file; lines: opens the file anew and returns its lines."""
    csv.field_size_limit(LONGEST)
    head = [line for line in islice(lines(), LOOKED_AT) if line.strip()] or [""]
    declared = DECLARED.fullmatch(head[0])
    header, *more = head[1:] or [""] if declared else head
    usual = "\t" if file.suffix.casefold() == ".tsv" else ","
    by_header = next((other for other in (usual, *";\t,|") if other in header), usual)
    plain = Dialect(declared[1] if declared else by_header, declared is not None)
    mark = re.escape(plain.delimiter)
    if plain.delimiter == "\t":
        return plain._replace(quote=None if _letters(lines()) else '"')
    quoted = re.compile(rf"(^|{mark})\s*'([^']|'')*'\s*({mark}|$)")
    if more and all(map(quoted.search, more)):
        plain = plain._replace(quote="'")
    fields = chain.from_iterable(csv.reader(more, delimiter=plain.delimiter))
    spaced = re.fullmatch(rf"[^{mark}]+({mark} [^{mark}]+)+", header)
    quotes = any(field[:1] == " " and field.lstrip()[:1] == plain.quote for field in fields)
    return plain._replace(spaces=bool(spaced or quotes))


def _letters(lines: Iterable[str]) -> bool:
    """Whether quotes of tab-separated lines are plain letters: in some row they do not pair.

    A line counts as a row if it and the next one have as many tabs as the header.
    """
    lines = iter(lines)
    tabs = next(lines, "").count("\t")
    quoted = (
        field
        for line, after in pairwise(chain(lines, ["\t" * tabs]))
        if '"' in line and line.count("\t") == tabs == after.count("\t")
        for field in line.rstrip("\r\n").split("\t")
        if field[:1] == '"'
    )
    return not all(map(PAIRED.fullmatch, quoted))
