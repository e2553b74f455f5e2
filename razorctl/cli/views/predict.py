"""What `predict` writes: CSV, or one JSON document, a row as soon as it is known."""

import csv as tables
import json as documents
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from razorctl.training.inference import Prediction


def counted(rows: Iterable["Prediction"], done: Callable[[int], None]) -> Iterator["Prediction"]:
    """The same rows; `done` is told how many have been taken."""
    for number, row in enumerate(rows, 1):
        yield row
        done(number)


def csv(
    stream: TextIO,
    document: Mapping[str, Any],
    rows: Iterable["Prediction"],
    top: int,
    every: bool,
) -> None:
    """A header and a line for each row; every: with the probability of every class."""
    classes = document["classes"]
    top = min(top, len(classes))
    more = [f"{what}_{rank}" for rank in range(2, top + 1) for what in ("label", "probability")]
    ends = [f"p_{name}" for name in classes] if every else []
    writer = tables.writer(stream, lineterminator="\n")
    writer.writerow(["file", "row", "label", "probability", *more, *ends])
    for row in rows:
        ranked = [cell for name, p in row.ranked(top) for cell in (name, f"{p:.6g}")]
        values = [f"{p:.6g}" for p in row.probabilities] if every else []
        writer.writerow([row.file, row.row, *ranked, *values])


def json(
    stream: TextIO,
    document: Mapping[str, Any],
    rows: Iterable["Prediction"],
    top: int,
    every: bool,
) -> None:
    """A document whose `predictions` have an object for each row."""
    head = documents.dumps({**document, "predictions": []}, indent=2)
    stream.write(head.removesuffix("]\n}"))
    between = "\n"
    for row in rows:
        (label, probability), *_ = ranked = row.ranked(top)
        entry: dict[str, Any] = {
            "file": row.file,
            "row": row.row,
            "label": label,
            "probability": probability,
        }
        if top > 1:
            entry["top"] = [{"label": name, "probability": p} for name, p in ranked]
        if every:
            entry["probabilities"] = dict(zip(row.classes, row.probabilities, strict=True))
        stream.write(f"{between}    {documents.dumps(entry)}")
        between = ",\n"
    stream.write("\n  ]\n}\n")
