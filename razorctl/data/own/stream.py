"""Rows of one's own that are read as they come, so that they need to fit nowhere."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from razorctl.data.own.ask import Ask
from razorctl.data.own.images import THREADS, fault
from razorctl.data.own.labels import Labels
from razorctl.data.own.raw import OUTSIDE, Fault, RawStreams, content, reason, refuse
from razorctl.data.own.rows import check
from razorctl.errors import DataError, RazorError
from razorctl.models import Modality, Rows
from razorctl.models.images import WIDE

if TYPE_CHECKING:
    import numpy as np
    from datasets import IterableDataset

# Rows that a shuffled epoch draws from; images, which are not decoded yet, take about 0.1 MB each.
BUFFER: Mapping[Modality, int] = {"text": 10_000, "image": 1_000}
CHECKED = 64  # rows that are checked at a time
TEXTS = ("text", "text_pair")
MEND = "correct it, or leave bad rows out with --skip-bad"


class Read(NamedTuple):
    """A row, and its position in the order in which its epoch is read, which it stands for."""

    position: int
    values: Mapping[str, Any]

    def __index__(self) -> int:
        return self.position


class Prepared:
    """What a transform makes of rows that are read, in whichever process loads them."""

    def __init__(self, transform: Callable[[Rows], Rows], modality: Modality) -> None:
        self.transform, self.modality = transform, modality

    def __getitem__(self, row: Read) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: list[Read]) -> list[dict[str, Any]]:
        columns: Rows = {name: [row.values[name] for row in rows] for name in rows[0].values}
        if self.modality == "image":
            columns["image"] = [_decoded(image) for image in columns["image"]]
        found = self.transform(columns)
        return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]


def _decoded(image: str | bytes) -> Any:
    from datasets import Image

    read = {"bytes": image, "path": None} if isinstance(image, bytes) else {"path": image}
    return Image().decode_example({"bytes": None, **read})


@dataclass(frozen=True)
class Stream:
    """The rows of a split, in an order that depends on a seed and an epoch alone.

    split: what it is called in the data. rows: as `Raw` has them. root: the folder that image paths
    must not leave; None if images are no files. count: the number of rows, None if it is not known.
    skipped: gets a line for each bad row that is left out, which is bad
    again in the next epoch. renamed: column of `rows` -> its name in `Raw`, if another.
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
    prepared: Prepared | None = None

    def with_transform(self, transform: Callable[[Rows], Rows]) -> "Stream":
        """The same rows with what makes inputs of them."""
        return replace(self, prepared=Prepared(transform, self.modality))

    def shuffled(self, seed: int, epoch: int, first: int = 0) -> Iterator[Read]:
        """The good rows of an epoch from the `first` on; earlier ones are read too, but not used.

        Raises DataError for a bad row, unless these are left out, and if rows cannot be read.
        """
        rows = self.rows.shuffle(seed=seed, buffer_size=BUFFER[self.modality])
        rows.set_epoch(epoch)
        if self.ask.skip_bad:  # only what is checked is counted
            return islice(self._good(rows), first, None)
        return self._good(rows, first)

    def in_order(self) -> Iterator[Read]:
        """The good rows as they are stored; raises what `shuffled` raises."""
        return self._good(self.rows)

    @property
    def labeled(self) -> bool:
        """Whether the first row has a label."""
        return all(self._numbers([row])[0] >= 0 for row in islice(self._stored(self.rows), 1))

    def _good(self, rows: Iterable[Mapping[str, Any]], first: int = 0) -> Iterator[Read]:
        stored = islice(enumerate(self._stored(rows)), first, None)
        while chunk := list(islice(stored, CHECKED)):
            read = [row for _, row in chunk]
            numbers = self._numbers(read)
            faults = self._faults(read, numbers)
            for (position, row), bad, label in zip(chunk, faults, numbers.tolist(), strict=True):
                if bad is not None:
                    place = row.get("place") or f"{self.split}, row {position} as it is read"
                    skipped = refuse(self.ask.name, [Fault(place, bad)], self.ask.skip_bad, MEND)
                    self.skipped.extend(skipped)
                    continue
                texts = {name: row[name] for name in TEXTS if name in row}
                image = {"image": content(row["image"])} if self.modality == "image" else {}
                yield Read(position, {**image, **texts, "label": label})

    def _numbers(self, read: list[Mapping[str, Any]]) -> "np.ndarray[Any, Any]":
        import pyarrow as pa

        kind = self.labels.values.type
        return self.labels.numbers(pa.chunked_array([[row["label"] for row in read]], kind))

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
                f"{self.split} of {self.ask.name} cannot be read on ({reason(error)}); go on with "
                "--resume when it can."
            ) from error

    def _faults(
        self, read: list[Mapping[str, Any]], numbers: "np.ndarray[Any, Any]"
    ) -> list[str | None]:
        """What is wrong with each row; None if nothing is."""
        import pyarrow as pa

        names = [name for name in ("fault", *TEXTS) if name in read[0]]
        columns = {name: [row.get(name) for row in read] for name in names}
        table = pa.table({name: pa.array(of, pa.string()) for name, of in columns.items()})
        bad = check(table, numbers)
        found = [bad.get(number) for number in range(len(read))]
        if self.modality == "text":
            return found
        good = [number for number in range(len(read)) if number not in bad]
        images = [content(read[number]["image"]) for number in good]
        # Not kept from one chunk to the next: processes that load rows may be forked in between.
        with ThreadPoolExecutor(THREADS) as pool:
            for number, fault in zip(good, pool.map(self._image_fault, images), strict=True):
                found[number] = fault
        return found

    def _image_fault(self, image: str | bytes | None) -> str | None:
        if self.root is None and isinstance(image, str):
            return OUTSIDE
        return fault(self.root, image, _wide)


def streams(ask: Ask, raw: RawStreams, skipped: list[str]) -> dict[str, Stream]:
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
    if not contest or streams["test"].labeled:
        return dict(streams)
    return {split: rows for split, rows in streams.items() if split != "test"}


def _wide(image: Any) -> str | None:
    """What is wrong with an image whose white only all images of its set tell."""
    if image.mode in WIDE:
        return f"of mode {image.mode}, whose white a stream does not tell: leave --streaming out"
    return None


def count(rows: Any) -> int | None:
    """The number of rows of a split; None if it is a stream that does not know it."""
    return rows.count if isinstance(rows, Stream) else len(rows)
