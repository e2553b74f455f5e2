"""How the rows of delimited text are written, by their lines: delimiter, quotes and spaces."""

import csv
import re
from collections.abc import Callable, Iterable
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

LOOKED_AT = 200  # lines
SAID = re.compile(r"\"?sep=(.)\"?\s*")  # the first line of spreadsheets
PAIRED = re.compile(r'"[^"]*(?:""[^"]*)*"')  # a field in quotes
LONGEST = 2**31 - 1  # characters of a field; the limit of `csv` is shorter than some texts


class Dialect(NamedTuple):
    """said: whether the first line is no row but the delimiter. quote: None if none is.

    spaces: whether a space follows each delimiter, which is no part of a field.
    """

    delimiter: str
    said: bool
    quote: str | None = '"'
    spaces: bool = False

    def rows(self, lines: Iterable[str]) -> Any:
        """The `csv.reader` of lines, which raises csv.Error for quotes that do not pair."""
        form: Any = {"delimiter": self.delimiter, "quotechar": self.quote, "strict": True}
        form["quoting"] = csv.QUOTE_MINIMAL if self.quote else csv.QUOTE_NONE
        return csv.reader(lines, skipinitialspace=self.spaces, **form)


def dialect(file: Path, lines: Callable[[], Iterable[str]]) -> Dialect:
    """The dialect of a CSV or TSV file; lines: returns its lines, as often as it is called."""
    csv.field_size_limit(LONGEST)
    head = [line for line in islice(lines(), LOOKED_AT) if line.strip()] or [""]
    found = SAID.fullmatch(head[0])
    header, *more = head[1:] or [""] if found else head
    usual = "\t" if file.suffix.casefold() == ".tsv" else ","
    by_header = next((other for other in (usual, *";\t,|") if other in header), usual)
    plain = Dialect(found[1] if found else by_header, found is not None)
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
    """Whether a quote does not pair in a line with tabs that is a row, as the next one is."""
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
