"""The output of `predict`: CSV or one JSON document, written row by row."""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO, TypeVar

from razorctl.cli.views.terminal import Lines
from razorctl.errors import UsageError
from razorctl.system import documents

if TYPE_CHECKING:
    from razorctl.data.own.whole import UnlabeledRows
    from razorctl.training.predicting.labels import LabelSet, Prediction
    from razorctl.training.predicting.objects import FoundObjects
    from razorctl.training.predicting.vectors import Vector

Row = TypeVar("Row")
INPUT = "input_"  # before the name of a column of the input that the output has, too
BETWEEN = "|"  # between the labels in a cell
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of formulas in spreadsheets


@dataclass(frozen=True)
class RowFormat:
    """How rows of one kind are written: the columns and cells of CSV, and the object of JSON."""

    columns: Sequence[str]
    cells: Callable[[Any], Sequence[Any]]
    entry: Callable[[Any], Mapping[str, Any]]


def fields_format(*columns: str) -> RowFormat:
    """The format of dataclasses with the fields file, row and `columns`."""

    def cell(value: Any) -> Any:
        if isinstance(value, float):
            return f"{value:.6g}"
        return " ".join(value) if isinstance(value, tuple) else value

    columns = ("file", "row", *columns)
    return RowFormat(columns, lambda row: [cell(getattr(row, name)) for name in columns], asdict)


def labels_format(classes: Sequence[str], top: int, every: bool) -> RowFormat:
    """The format of rows with the `top` most probable classes; every: add all probabilities."""
    shown = min(top, len(classes))
    more = [f"{what}_{rank}" for rank in range(2, shown + 1) for what in ("label", "probability")]
    ends = [f"p_{name}" for name in classes] if every else []

    def cells(row: "Prediction") -> list[Any]:
        ranked = [cell for name, p in row.ranked(shown) for cell in (name, f"{p:.6g}")]
        values = [f"{p:.6g}" for p in row.probabilities] if every else []
        return [row.file, row.row, *ranked, *values]

    def entry(row: "Prediction") -> dict[str, Any]:
        ranked = [{"label": name, "probability": p} for name, p in row.ranked(shown)]
        result: dict[str, Any] = {"file": row.file, "row": row.row, **ranked[0]}
        if top > 1:
            result["top"] = ranked
        if every:
            result["probabilities"] = dict(zip(row.classes, row.probabilities, strict=True))
        return result

    return RowFormat(["file", "row", "label", "probability", *more, *ends], cells, entry)


def several_format(classes: Sequence[str], every: bool) -> RowFormat:
    """The format of rows with several labels; every: add the probabilities of all."""
    ends = [f"p_{name}" for name in classes] if every else []

    def cells(row: "LabelSet") -> list[Any]:
        values = [f"{row.probabilities[name]:.6g}" for name in classes] if every else []
        return [row.file, row.row, BETWEEN.join(row.labels), *values]

    def entry(row: "LabelSet") -> dict[str, Any]:
        chosen: dict[str, Any] = {"file": row.file, "row": row.row, "labels": [*row.labels]}
        return {**chosen, "probabilities": {**row.probabilities}} if every else chosen

    return RowFormat(["file", "row", "labels", *ends], cells, entry)


def vectors_format() -> RowFormat:
    """The format of embeddings; a cell of CSV has the numbers as JSON."""
    columns = ("file", "row", "vector")
    return RowFormat(columns, lambda row: [row.file, row.row, documents.text(row.vector)], asdict)


def with_columns(row_format: RowFormat, parts: Sequence["UnlabeledRows"]) -> RowFormat:
    """The format with the columns of the rows' tables, after file and row in CSV.

    In CSV, INPUT stands before a name that the predictions have; raises UsageError if the table has
    that name, too. In JSON an object has the names as they are.
    """
    tables = [part.table for part in parts]
    names = list(dict.fromkeys(name for table in tables if table for name in table.names))
    heads = [INPUT + name if name in row_format.columns else name for name in names]
    if twice := next((name for name in heads if heads.count(name) > 1), None):
        raise UsageError(f"two columns would be called {twice}; rename that one in the table.")
    every = (pair for part in parts for pair in zip(part.places, part.kept(), strict=True))
    at: tuple[Any, Mapping[str, Any]] = None, {}

    def kept(row: Any) -> Mapping[str, Any]:
        nonlocal at
        while at[0] != (row.file, row.row):  # an image may have several rows, or none
            at = next(every)
        return at[1]

    def cells(row: Any) -> list[Any]:
        values = (kept(row).get(name) for name in names)
        shown = [documents.text(v) if isinstance(v, (list, dict)) else v for v in values]
        first, second, *rest = row_format.cells(row)
        return [first, second, *shown, *rest]

    columns = [*row_format.columns[:2], *heads, *row_format.columns[2:]]
    return RowFormat(columns, cells, lambda row: {**row_format.entry(row), "columns": kept(row)})


def report_progress(rows: Iterable[Row], done: Callable[[int], None]) -> Iterator[Row]:
    """Yields the rows, and calls `done` with their number so far."""
    for number, row in enumerate(rows, 1):
        yield row
        done(number)


def write_csv(
    stream: TextIO, rows: Iterable[Any], row_format: RowFormat, spreadsheet: bool = False
) -> None:
    """Writes a header and a line for each row.

    spreadsheet: write ' before cells that a spreadsheet would run as a formula.
    """
    writer = csv.writer(Lines(stream))
    writer.writerow(row_format.columns)
    for row in rows:
        cells = row_format.cells(row)
        writer.writerow(map(_inert, cells) if spreadsheet else cells)


def write_array(stream: BinaryIO, rows: Iterable["Vector"], _: RowFormat) -> None:
    """Writes embeddings as an array of NumPy [rows, d], fp32."""
    import numpy as np

    np.save(stream, np.asarray([row.vector for row in rows], np.float32))


def write_coco(
    stream: TextIO, rows: Iterable["FoundObjects"], _: RowFormat, document: Mapping[str, Any]
) -> None:
    """Writes the document with the objects of images as COCO has them; classes count from 1."""
    classes = document["classes"]
    categories = [{"id": number, "name": name} for number, name in enumerate(classes, 1)]
    images, annotations = list[dict[str, Any]](), list[dict[str, Any]]()
    for image, row in enumerate(rows):
        place = {"file_name": row.file, "row": row.row}
        images.append({"id": image, **place, "width": row.width, "height": row.height})
        for one in row.objects:
            width, height = one.right - one.left, one.bottom - one.top
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image,
                    "category_id": classes.index(one.label) + 1,
                    "bbox": [one.left, one.top, width, height],
                    "area": width * height,
                    "iscrowd": 0,
                    "score": one.score,
                }
            )
    lists = {"images": images, "annotations": annotations, "categories": categories}
    stream.write(documents.text({**document, **lists}, indent=2) + "\n")


def _inert(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell


def write_json(
    stream: TextIO, rows: Iterable[Any], row_format: RowFormat, document: Mapping[str, Any]
) -> None:
    """Writes the document with an object for each row in its `predictions`."""
    head = documents.text({**document, "predictions": []}, indent=2)
    stream.write(head.removesuffix("]\n}"))
    between = "\n"
    for row in rows:
        stream.write(f"{between}    {documents.text(row_format.entry(row))}")
        between = ",\n"
    stream.write("\n  ]\n}\n")
