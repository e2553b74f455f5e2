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
from razorctl.models.rows import NEGATIVE as NEGATIVE
from razorctl.models.rows import TEXT_COLUMNS as TEXT_COLUMNS
from razorctl.models.rows import text_columns
from razorctl.system.folders import spelled

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

# Never skipped: a table must not reach other files, or other machines.
OUTSIDE = "outside the folder of its table"
ADDRESS = "an address, not the path of a file"
NEVER_SKIPPED = (OUTSIDE, ADDRESS)
MISSING = {"missing": "image", "mask: missing": "mask"}  # reason -> the column of the path
NOT_UTF8 = "its name is not UTF-8: rename it"
SHOWN = 5  # bad rows that a sentence names

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

    name: of the data. rows: how many there are, bad ones included. mend: the end of the sentence.
    """
    left = "" if rows is None else f", which leaves {units.count(rows - len(faults), 'row')}"
    mend = mend or f"correct them, or leave them out with --skip-bad{left}"
    causes: dict[str, list[str]] = {}
    for place, reason in faults:
        causes.setdefault(reason, []).append(place)
    each = max(1, SHOWN // len(causes))
    named = [
        f"{', '.join(places[:each])}{_more(len(places) - each)} ({reason})"
        for reason, places in causes.items()
    ]
    few = ", ".join(named[:SHOWN]) + _more(sum(map(len, [*causes.values()][SHOWN:])))
    return DataError(f"{name} has {units.count(len(faults), 'bad row')}: {few}; {mend}.")


def _more(count: int) -> str:
    return f" and {count:,} more" if count > 0 else ""


def skip_or_refuse(
    name: str, faults: Sequence[Fault], skip_bad: bool, rows: int | None = None
) -> tuple[str, ...]:
    """A line for each fault, whose rows are left out.

    Raises DataError without `skip_bad`, and for rows that are never left out. name, rows: as in
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

    A row has an `image`, or a `text` and sometimes a `text_pair`, and its label: `label` for
    classification, `number` for regression, `labels` for multi-label, or `flag.0`, `flag.1` and so
    on for each class. For embedding it has a `text`, a `text_pair`, and `negative.0` and so on, or
    a `number`, the score of the pair; or an `image` and a `text`, its caption. For detection it has
    an `image` and `objects` as in `own.objects`, and sometimes the `size` of the image that boxes
    were drawn in, [width, height]. For other tasks it has a `text` or `messages` alone, an `image`
    and a `mask`, or `tokens` and `tags`. An image is a path, bytes, or the struct of `datasets`
    with both. A row may also have a `place`, which names it, a `fault`, and a `name`, an image's
    path in its folder.

    Args:
        name: the name of the data.
        splits: the rows of `train`, and of `validation` and `test` if there are any.
        names: split -> its name in the data.
        details: the end of a sentence on the columns or folders that are used.
        class_names: the names of classes by their numbers, the name of a regression's number or of
            a score, or the names of the columns of texts of an embedding; None if labels are names.
        untyped: whether labels are text only because the file has no other type.
        root: the folder that image paths must not leave; None if they may.
        nowhere: faults that belong to no row, such as an empty class folder.
        task: the task that the rows are for.
        notes: sentences on what a user may not have meant.
        cut: whether the two training rows are the beginning and the end of one text; the end can be
            held out.
        blanks: whether blank texts are left out without being bad.
        sorted: whether every label is a class, as where labels are folders: "NA" is one, too.
        mask_classes: the classes of the values of masks, as `mask_classes.parse` reads them; "" if
            values are numbers of classes.
        box_format: the order of a box's numbers, as `Job.box_format` calls it; "" if not known yet.
        found_format: the `box_format`, if it is known by the sizes of the images alone; "" if not.
        shares: whether the numbers of boxes are shares of the image's width and height, not pixels.
    """

    name: str
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
    box_format: str = ""
    found_format: str = ""
    shares: bool = False

    @property
    def modality(self) -> Modality:
        return "image" if "image" in next(iter(self.splits.values())).column_names else "text"

    @property
    def captioned(self) -> bool:
        """Whether rows are images with captions."""
        return self.task == "embedding" and self.modality == "image"

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
                if reason in MISSING:
                    path = str(
                        content(self.splits[split].data.column(MISSING[reason])[row].as_py())
                    )
                    place = place if path.endswith(place) else f"{place}: {path}"
                yield Fault(place, reason)


def content(image: Any) -> Any:
    """The path or the bytes of an image in any form that rows have."""
    if isinstance(image, dict):
        return image["path"] if image["bytes"] is None else image["bytes"]
    return image


def inputs_in(rows: "Dataset") -> list[str]:
    """The columns of rows that are inputs or masks, in the order of their digests."""
    every = ("image", "mask", *text_columns(rows.column_names), "messages", "tokens")
    return [name for name in every if name in rows.column_names]


def is_text(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
