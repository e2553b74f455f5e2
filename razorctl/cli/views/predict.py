"""What `predict` writes: CSV, or one JSON document, a row as soon as it is known."""

import csv as tables
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from razorctl import documents

if TYPE_CHECKING:
    from razorctl.training.predicting.labels import Prediction

Row = TypeVar("Row")
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # the starts of a formula of a spreadsheet


@dataclass(frozen=True)
class RowFormat:
    """How a kind of rows is written: the columns and the cells of CSV, and an object of JSON."""

    columns: Sequence[str]
    cells: Callable[[Any], Sequence[Any]]
    entry: Callable[[Any], Mapping[str, Any]]


def fields_format(*columns: str) -> RowFormat:
    """Rows that are written as they are: dataclasses with these fields."""

    def cells(row: Any) -> list[Any]:
        values = (getattr(row, column) for column in columns)
        return [f"{value:.6g}" if isinstance(value, float) else value for value in values]

    return RowFormat(columns, cells, asdict)


def labels_format(classes: Sequence[str], top: int, every: bool) -> RowFormat:
    """Rows with the `top` most probable classes; every: with the probability of every class."""
    shown = min(top, len(classes))
    more = [f"{what}_{rank}" for rank in range(2, shown + 1) for what in ("label", "probability")]
    ends = [f"p_{name}" for name in classes] if every else []

    def cells(row: "Prediction") -> list[Any]:
        ranked = [cell for name, p in row.ranked(shown) for cell in (name, f"{p:.6g}")]
        values = [f"{p:.6g}" for p in row.probabilities] if every else []
        return [row.file, row.row, *ranked, *values]

    def entry(row: "Prediction") -> dict[str, Any]:
        (label, probability), *_ = ranked = row.ranked(shown)
        found: dict[str, Any] = {"file": row.file, "row": row.row}
        found |= {"label": label, "probability": probability}
        if top > 1:
            found["top"] = [{"label": name, "probability": p} for name, p in ranked]
        if every:
            found["probabilities"] = dict(zip(row.classes, row.probabilities, strict=True))
        return found

    return RowFormat(["file", "row", "label", "probability", *more, *ends], cells, entry)


def report_progress(rows: Iterable[Row], done: Callable[[int], None]) -> Iterator[Row]:
    """The same rows; `done` is told how many have been taken."""
    for number, row in enumerate(rows, 1):
        yield row
        done(number)


def csv(
    stream: TextIO, rows: Iterable[Any], row_format: RowFormat, spreadsheet: bool = False
) -> None:
    """A header and a line for each row.

    spreadsheet: write an apostrophe before texts that a spreadsheet would take for a formula.
    """
    writer = tables.writer(stream, lineterminator="\n")
    writer.writerow(row_format.columns)
    for row in rows:
        cells = row_format.cells(row)
        writer.writerow(map(_inert, cells) if spreadsheet else cells)


def _inert(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell


def json(
    stream: TextIO, rows: Iterable[Any], row_format: RowFormat, document: Mapping[str, Any]
) -> None:
    """A document whose `predictions` have an object for each row."""
    head = documents.text({**document, "predictions": []}, indent=2)
    stream.write(head.removesuffix("]\n}"))
    between = "\n"
    for row in rows:
        stream.write(f"{between}    {documents.text(row_format.entry(row))}")
        between = ",\n"
    stream.write("\n  ]\n}\n")
