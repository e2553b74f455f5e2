"""Stored rows, and how bad rows are named, counted and refused."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from razorctl import units
from razorctl.config.tasks import Task
from razorctl.errors import DataError, raise_lack
from razorctl.models import Modality
from razorctl.system.folders import spelled

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

TEXT_COLUMNS = ("text", "text_pair")
COLUMNS = ("image", "mask", *TEXT_COLUMNS, "messages", "tokens")  # of inputs and masks
# Never skipped: a table must not reach other files, or other machines.
OUTSIDE = "outside the folder of its table"
ADDRESS = "an address, not the path of a file"
NEVER_SKIPPED = (OUTSIDE, ADDRESS)
SOUGHT = {"missing": "image", "mask: missing": "mask"}  # reason -> the column of the file
NOT_UTF8 = "its name is not UTF-8: rename it"
NAMED = 5  # bad rows that a sentence names

Reasons = list[str | None]  # what is wrong with each value
Faults = Mapping[str, Mapping[int, str]]  # split -> row -> what is wrong with it


class Fault(NamedTuple):
    """The reason why a row, a file or a folder cannot be used, with its place."""

    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.place} ({self.reason})"


def refusal(
    name: str, faults: Sequence[Fault], rows: int | None = None, mend: str | None = None
) -> DataError:
    """The error for bad files and rows: few of each cause, and what mends it.

    name: what the data are called. rows: how many rows there are, bad ones included. mend: ends
    the sentence.
    """
    left = "" if rows is None else f", which leaves {units.count(rows - len(faults), 'row')}"
    mend = mend or f"correct them, or leave them out with --skip-bad{left}"
    causes: dict[str, list[str]] = {}
    for place, reason in faults:
        causes.setdefault(reason, []).append(place)
    each = max(1, NAMED // len(causes))
    named = [
        f"{', '.join(places[:each])}{_more(len(places) - each)} ({reason})"
        for reason, places in causes.items()
    ]
    few = ", ".join(named[:NAMED]) + _more(sum(map(len, [*causes.values()][NAMED:])))
    return DataError(f"{name} has {units.count(len(faults), 'bad row')}: {few}; {mend}.")


def _more(count: int) -> str:
    return f" and {count:,} more" if count > 0 else ""


def skip_or_refuse(
    name: str, faults: Sequence[Fault], skip_bad: bool, rows: int | None = None
) -> tuple[str, ...]:
    """A line for each fault, whose rows are left out.

    Raises DataError without `skip_bad`, and for rows that are never left out. name, rows: as of
    `refusal`.
    """
    if outside := [fault for fault in faults if fault.reason in NEVER_SKIPPED]:
        mend = "name images by paths inside the folder of the table"
        raise refusal(name, outside, mend=mend)
    if faults and not skip_bad:
        raise refusal(name, faults, rows)
    return tuple(map(str, faults))


def not_utf8(text: str) -> str | None:
    """The fault of a path or a text whose bytes are not UTF-8; None if they are."""
    return None if spelled(text) == text else NOT_UTF8


def walk(top: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` that leaves nothing out: it raises DataError for a folder that it cannot list."""

    def fail(error: OSError) -> NoReturn:
        raise_lack(error)
        raise DataError(f"{error.filename} cannot be read ({error.strerror}); correct that.")

    return os.walk(top, onerror=fail)


@dataclass(frozen=True)
class RawRows:
    """The stored rows of each split of a data set.

    A row has a `label` (regression: `number`, multi-label: `labels`, or a `flag.0` and so on for
    each class), and an `image` or a `text` and sometimes a `text_pair`. An image is a path, bytes,
    or the struct of `datasets` that has both. For other tasks a row has a `text` or `messages`
    alone, an `image` and a `mask`, or `tokens` and `tags`. A row may also have a `place`, which
    names it, a `fault`, and a `name`, the path of an image in its folder.

    Args:
        name: what the data are called.
        modality: what the rows are.
        splits: `train`, `validation` and `test`, as far as they are there.
        names: split -> what it is called in the data.
        details: what was detected, as the end of a sentence.
        class_names: the names of labels that are numbers of classes, or of a number; None if labels
            are names.
        untyped: whether labels are text only because the file has no other type.
        root: the folder that image paths must not leave; None if they may.
        nowhere: faults of what is no row, such as an empty folder.
        task: what the rows are for.
        notes: a sentence on each thing that a user may not have meant.
        cut: whether the two training rows are one text, whose end is what can be held out.
        blanks: whether texts may be blank, which are then left out.
        sorted: whether no text stands for no label, as where labels are folders.
        mask_classes: what the pixels of masks mean, as `mask_classes.parse` reads it; "" if values
            are numbers of classes.
    """

    name: str
    modality: Modality
    splits: Mapping[str, "Dataset"]
    names: Mapping[str, str]
    details: str
    class_names: tuple[str, ...] | None = None
    untyped: bool = False
    root: Path | None = None
    nowhere: tuple[Fault, ...] = ()
    task: Task = "classification"
    notes: tuple[str, ...] = ()
    cut: bool = False
    blanks: bool = False
    sorted: bool = False
    mask_classes: str = ""

    def place(self, split: str, row: int) -> str:
        """The file or the line of a row, for a sentence."""
        rows = self.splits[split]
        if "place" in rows.column_names:
            return str(rows.data.column("place")[row])
        return f"{self.names[split]}, row {row}"

    def with_places(self, faults: Faults) -> Iterator[Fault]:
        """The faults of rows with their places."""
        for split, bad in faults.items():
            for row, reason in bad.items():
                place = self.place(split, row)
                if reason in SOUGHT:
                    path = str(content(self.splits[split].data.column(SOUGHT[reason])[row].as_py()))
                    place = place if path.endswith(place) else f"{place}: {path}"
                yield Fault(place, reason)


def content(image: Any) -> Any:
    """The path or the bytes of an image as a row has it."""
    if isinstance(image, dict):
        return image["path"] if image["bytes"] is None else image["bytes"]
    return image


def is_text(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
