"""Rows of one's own that are read as they come, so that they need to fit nowhere."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from razorctl.data.own.bad import line, refusal
from razorctl.data.own.images import THREADS, fault
from razorctl.data.own.labels import missing, name_of
from razorctl.data.own.raw import NEVER_SKIPPED, OUTSIDE, content
from razorctl.errors import DataError, RazorError
from razorctl.models import Modality, Rows
from razorctl.models.images import WIDE

if TYPE_CHECKING:
    from datasets import IterableDataset

# Rows that a shuffled epoch draws from; images, which are not decoded yet, take about 0.1 MB each.
BUFFER: Mapping[Modality, int] = {"text": 10_000, "image": 1_000}
CHECKED = 64  # rows that are checked at a time


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

    name: the data set. split: what the split is called there. rows: as `Raw` has them. classes: the
    names of the labels. numbered: whether labels are numbers of classes, else they are names.
    root: the folder that image paths must not leave; None if images are no files. count: the number
    of rows, None if it is not known. skipped: gets a line for each bad row that is left out, which
    is bad again in the next epoch. renamed: column of `rows` -> its name in `Raw`, if another.
    """

    name: str
    split: str
    rows: "IterableDataset"
    modality: Modality
    classes: tuple[str, ...]
    numbered: bool
    root: Path | None
    count: int | None
    skip_bad: bool
    skipped: list[str]
    renamed: Mapping[str, str] = field(default_factory=dict)
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
        if self.skip_bad:  # only what is checked is counted
            return islice(self._good(rows), first, None)
        return self._good(rows, first)

    def in_order(self) -> Iterator[Read]:
        """The good rows as they are stored; raises what `shuffled` raises."""
        return self._good(self.rows)

    @property
    def labeled(self) -> bool:
        """Whether the first row has a label."""
        return all(map(self._known, islice(self._stored(self.rows), 1)))

    def _good(self, rows: Iterable[Mapping[str, Any]], first: int = 0) -> Iterator[Read]:
        numbers = {name: number for number, name in enumerate(self.classes)}
        stored = islice(enumerate(self._stored(rows)), first, None)
        while chunk := list(islice(stored, CHECKED)):
            for (position, row), bad in zip(chunk, self._faults(chunk), strict=True):
                if bad is not None:
                    self._refuse(position, row, bad)
                    continue
                texts = {name: row[name] for name in ("text", "text_pair") if name in row}
                image = {"image": content(row["image"])} if self.modality == "image" else {}
                label = row["label"] if self.numbered else numbers[name_of(row["label"])]
                yield Read(position, {**image, **texts, "label": label})

    def _stored(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        try:
            for row in rows:
                yield {self.renamed.get(name, name): value for name, value in row.items()}
        except RazorError:
            raise
        except Exception as error:  # the libraries raise many kinds, of files and of networks
            raise DataError(
                f"{self.split} of {self.name} cannot be read on ({reason(error)}); go on with "
                "--resume when it can."
            ) from error

    def _faults(self, chunk: list[tuple[int, Mapping[str, Any]]]) -> list[str | None]:
        """What is wrong with each row; None if nothing is."""
        found = [self._fault(row) for _, row in chunk]
        if self.modality == "text":
            return found
        good = [number for number, bad in enumerate(found) if bad is None]
        images = [content(chunk[number][1]["image"]) for number in good]
        # Not kept from one chunk to the next: processes that load rows may be forked in between.
        with ThreadPoolExecutor(THREADS) as pool:
            for number, bad in zip(good, pool.map(self._image_fault, images), strict=True):
                found[number] = bad
        return found

    def _image_fault(self, image: str | bytes | None) -> str | None:
        if self.root is None and isinstance(image, str):
            return OUTSIDE
        return fault(self.root, image, _wide)

    def _fault(self, row: Mapping[str, Any]) -> str | None:
        if row.get("fault") is not None:
            return str(row["fault"])
        for name in ("text", "text_pair"):
            if name in row and not (isinstance(row[name], str) and row[name].strip()):
                return "empty text"
        return None if self._known(row) else "no label"

    def _known(self, row: Mapping[str, Any]) -> bool:
        label = row["label"]
        return not missing(label) and (not self.numbered or 0 <= label < len(self.classes))

    def _refuse(self, position: int, row: Mapping[str, Any], why: str) -> None:
        """Notes a bad row; raises DataError if it is not to be left out."""
        bad = line(row.get("place") or f"{self.split}, row {position} as it is read", why)
        if why in NEVER_SKIPPED:
            mend = "name images by paths inside the folder of the table"
            raise refusal(self.name, [bad], mend)
        if not self.skip_bad:
            mend = "correct it, or leave bad rows out with --skip-bad"
            raise refusal(self.name, [bad], mend)
        self.skipped.append(bad)


def _wide(image: Any) -> str | None:
    """What is wrong with an image whose white only all images of its set tell."""
    if image.mode in WIDE:
        return f"of mode {image.mode}, whose white a stream does not tell: leave --streaming out"
    return None


def reason(error: Exception) -> str:
    """An error of a library in a few words."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def count(rows: Any) -> int | None:
    """The number of rows of a split; None if it is a stream that does not know it."""
    return rows.count if isinstance(rows, Stream) else len(rows)
