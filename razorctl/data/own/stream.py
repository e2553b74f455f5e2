"""Rows of one's own that are read as they come, so that they need to fit nowhere."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from razorctl.data.own.ask import Ask
from razorctl.data.own.images import THREADS, image_fault
from razorctl.data.own.labels import Labels
from razorctl.data.own.raw import (
    OUTSIDE,
    TEXT_COLUMNS,
    Fault,
    RawStreams,
    content,
    skip_or_refuse,
)
from razorctl.data.own.rows import table_faults
from razorctl.errors import DataError, RazorError, reason_of
from razorctl.models import Modality, Rows
from razorctl.models.images import WIDE

if TYPE_CHECKING:
    import numpy as np
    from datasets import IterableDataset

# Rows that a shuffled epoch draws from; images, which are not decoded yet, take about 0.1 MB each.
BUFFER: Mapping[Modality, int] = {"text": 10_000, "image": 1_000}
CHECKED = 64  # rows that are checked at a time
MEND = "correct it, or leave bad rows out with --skip-bad"


class StreamRow(NamedTuple):
    """A row, and its position in the order in which its epoch is read, which it stands for."""

    position: int
    values: Mapping[str, Any]

    def __index__(self) -> int:
        return self.position


class TransformedRows:
    """The rows that a transform makes of those that are read, in whichever process loads them."""

    def __init__(self, transform: Callable[[Rows], Rows], modality: Modality) -> None:
        self.transform, self.modality = transform, modality

    def __getitem__(self, row: StreamRow) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: list[StreamRow]) -> list[dict[str, Any]]:
        columns: Rows = {name: [row.values[name] for row in rows] for name in rows[0].values}
        if self.modality == "image":
            columns["image"] = [_decoded(image) for image in columns["image"]]
        inputs = self.transform(columns)
        return [dict(zip(inputs, row, strict=True)) for row in zip(*inputs.values(), strict=True)]


def _decoded(image: str | bytes) -> Any:
    from datasets import Image

    is_bytes = isinstance(image, bytes)
    struct = {"bytes": image if is_bytes else None, "path": None if is_bytes else image}
    return Image().decode_example(struct)


@dataclass(frozen=True)
class Stream:
    """The rows of a split, in an order that depends on a seed and an epoch alone.

    Args:
        ask: what is asked of the data.
        split: what it is called in the data.
        rows: the rows, as those of `Raw`.
        modality: what they are.
        labels: the classes.
        root: the folder that image paths must not leave; None if images are no files.
        count: the number of rows; None if it is not known.
        skipped: gets a line for each bad row that is left out; it is bad again in the next epoch.
        renamed: column of `rows` -> its name in `Raw`, if another.
        transformed: the rows with a transform; None before one is set.
    """

    ask: Ask
    split: str
    rows: "IterableDataset"
    modality: Modality
    labels: Labels
    root: Path | None
    count: int | None
    skipped: list[str]
    renamed: Mapping[str, str]
    transformed: TransformedRows | None = None

    def with_transform(self, transform: Callable[[Rows], Rows]) -> "Stream":
        """The stream with a transform, which makes inputs of its rows."""
        return replace(self, transformed=TransformedRows(transform, self.modality))

    def shuffled(self, seed: int, epoch: int, first: int = 0) -> Iterator[StreamRow]:
        """The good rows of an epoch from the `first` on; earlier ones are read too, but not used.

        Raises DataError for a bad row, unless these are left out, and if rows cannot be read.
        """
        rows = self.rows.shuffle(seed=seed, buffer_size=BUFFER[self.modality])
        rows.set_epoch(epoch)
        if self.ask.skip_bad:  # only what is checked is counted
            return islice(self._good(rows), first, None)
        return self._good(rows, first)

    def in_order(self) -> Iterator[StreamRow]:
        """The good rows as they are stored; raises what `shuffled` raises."""
        return self._good(self.rows)

    @property
    def has_labels(self) -> bool:
        """Whether the first row has a label."""
        return all(self._numbers([row])[0] >= 0 for row in islice(self._stored(self.rows), 1))

    def _good(self, rows: Iterable[Mapping[str, Any]], first: int = 0) -> Iterator[StreamRow]:
        stored = islice(enumerate(self._stored(rows)), first, None)
        while chunk := list(islice(stored, CHECKED)):
            values = [row for _, row in chunk]
            numbers = self._numbers(values)
            faults = self._faults(values, numbers)
            for (position, row), fault, label in zip(chunk, faults, numbers.tolist(), strict=True):
                if fault is not None:
                    self._skip(position, row, fault)
                    continue
                inputs = {name: row[name] for name in TEXT_COLUMNS if name in row}
                if self.modality == "image":
                    inputs = {"image": content(row["image"]), **inputs}
                yield StreamRow(position, {**inputs, "label": label})

    def _skip(self, position: int, row: Mapping[str, Any], fault: str) -> None:
        place = row.get("place") or f"{self.split}, row {position} as it is read"
        faults = [Fault(place, fault)]
        self.skipped.extend(skip_or_refuse(self.ask.name, faults, self.ask.skip_bad, MEND))

    def _numbers(self, rows: list[Mapping[str, Any]]) -> "np.ndarray[Any, Any]":
        import pyarrow as pa

        kind = self.labels.values.type
        return self.labels.numbers(pa.chunked_array([[row["label"] for row in rows]], kind))

    def _stored(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        try:
            if not self.renamed:
                yield from rows
                return
            for row in rows:
                yield {self.renamed.get(name, name): value for name, value in row.items()}
        except RazorError:
            raise
        except Exception as error:  # the libraries raise many kinds, of files and of networks
            raise DataError(
                f"{self.split} of {self.ask.name} cannot be read on ({reason_of(error)}); go on "
                "with --resume when it can."
            ) from error

    def _faults(
        self, rows: list[Mapping[str, Any]], numbers: "np.ndarray[Any, Any]"
    ) -> list[str | None]:
        """The fault of each row; None if there is none."""
        import pyarrow as pa

        names = [name for name in ("fault", *TEXT_COLUMNS) if name in rows[0]]
        columns = {name: [row.get(name) for row in rows] for name in names}
        table = pa.table({name: pa.array(of, pa.string()) for name, of in columns.items()})
        by_row = table_faults(table, numbers)
        faults = [by_row.get(number) for number in range(len(rows))]
        if self.modality == "text":
            return faults
        good = [number for number in range(len(rows)) if number not in by_row]
        images = [content(rows[number]["image"]) for number in good]
        # Not kept from one chunk to the next: processes that load rows may be forked in between.
        with ThreadPoolExecutor(THREADS) as pool:
            for number, fault in zip(good, pool.map(self._image_fault, images), strict=True):
                faults[number] = fault
        return faults

    def _image_fault(self, image: str | bytes | None) -> str | None:
        if self.root is None and isinstance(image, str):
            return OUTSIDE
        return image_fault(self.root, image, _wide)


def split_streams(ask: Ask, raw: RawStreams, skipped: list[str]) -> dict[str, Stream]:
    """The streams of each split; skipped: as of `Stream`."""
    labels = Labels(raw.classes, raw.labels)
    return {
        split: Stream(
            ask=ask,
            split=name,
            rows=raw.rows(split),
            modality=raw.modality,
            labels=labels,
            root=raw.root,
            count=raw.counts[split],
            skipped=skipped,
            renamed=raw.renamed,
        )
        for split, name in raw.names.items()
    }


def with_labels(ask: Ask, streams: Mapping[str, Stream]) -> dict[str, Stream]:
    """The streams without a test split that has no labels, as in a contest, unless it is asked for.

    Reads its first row. Raises DataError if that cannot be read.
    """
    contest = ask.split is None and {"validation", "test"} <= streams.keys()
    if not contest or streams["test"].has_labels:
        return dict(streams)
    return {split: rows for split, rows in streams.items() if split != "test"}


def _wide(image: Any) -> str | None:
    """The fault of an image whose white only all images of its set tell."""
    if image.mode in WIDE:
        return f"of mode {image.mode}, whose white a stream does not tell: leave --streaming out"
    return None


def row_count(rows: Any) -> int | None:
    """The number of rows of a split; None if it is a stream that does not know it."""
    return rows.count if isinstance(rows, Stream) else len(rows)
