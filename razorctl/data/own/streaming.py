"""Which streams a job names: tables, and sets of the hub whose files are tables."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl import hub as cache
from razorctl.data import Splits
from razorctl.data.own import columns, hub, labels, lines, parquet, rows, tasks
from razorctl.data.own.ask import Ask
from razorctl.data.own.columns import Columns
from razorctl.data.own.raw import Raw
from razorctl.data.own.store import BATCH, stamp
from razorctl.data.own.stream import Stream, reason
from razorctl.data.own.tables import Tables
from razorctl.errors import DataError, MissingError, RazorError, UsageError
from razorctl.job import Task

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Features, IterableDataset

SAMPLE = 100  # rows of the hub that columns are detected from


def check(ask: Ask, splits: Mapping[str, Any]) -> None:
    """Raises UsageError if nothing is there to evaluate on: rows of a stream are not put aside."""
    if not {"validation", "test"} & splits.keys():
        raise UsageError(
            f"{ask.name} has no validation or test split, and none is put aside of rows that are "
            "streamed; give it one, or leave --streaming out."
        )
    if ask.validation is not None:
        raise UsageError(
            f"no rows are put aside of {ask.name}, which is streamed; leave --validation or "
            "--streaming out."
        )


def of_classes(name: str, task: Task) -> None:
    """Raises UsageError for another task than classification."""
    if task != "classification":
        raise UsageError(f"{name} is for {task}, which reads it whole; leave --streaming out.")


def of_tables(ask: Ask, tables: Tables) -> tuple[Splits, Columns]:
    """The streams of tables, whose labels are read once before all else.

    Raises DataError if these are no classes, or those of the training rows are not enough.
    """
    import numpy as np
    from datasets import Dataset, IterableDataset
    from pyarrow import Table

    name, used = ask.name, tables.columns
    check(ask, tables.files)
    of_classes(name, used.task)
    found = {
        split: Dataset(Table.from_arrays([_labels(tuple(part), used, stamp(part))], ["label"]))
        for split, part in tables.files.items()
    }
    raw = Raw(
        *(name, used.modality, found, tables.splits, used.told),
        class_names=tables.class_names,
        untyped=tables.untyped,
    )
    classes = labels.of(raw)
    numbers = {split: classes.numbers(of.data.column("label")) for split, of in found.items()}
    labeled = {split: np.flatnonzero(of >= 0) for split, of in numbers.items()}
    rows.sound(raw, classes.classes, numbers, labeled)

    skipped: list[str] = []

    def stream(split: str) -> Stream:
        settings = {"files": list(tables.files[split]), "used": used}
        return Stream(
            name,
            tables.splits[split],
            IterableDataset.from_generator(_records, gen_kwargs=settings),
            used.modality,
            classes,
            tables.root,
            len(found[split]),
            ask.skip_bad,
            skipped,
        )

    return _splits({split: stream(split) for split in tables.files}), used


@lru_cache(maxsize=8)
def _labels(files: tuple[Path, ...], used: Columns, _: str) -> "pa.ChunkedArray":
    """The labels of files, which are read again if the last argument, their stamp, is another."""
    import pyarrow as pa

    if files[0].suffix.casefold() == ".parquet":
        parts = [parquet.labels(file, used) for file in files]
        return pa.chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)
    found = (row["label"] for row in _records(files, used))
    chunks = iter(lambda: list(islice(found, BATCH)), [])
    return pa.chunked_array((pa.array(chunk, pa.string()) for chunk in chunks), pa.string())


def _records(files: Sequence[Path], used: Columns) -> Iterator[dict[str, Any]]:
    for file in files:
        if file.suffix.casefold() == ".parquet":
            yield from parquet.records(file, used)
        else:
            yield from lines.rows(file, used, file.parent)


def of_hub(ask: Ask) -> tuple[Splits, Columns]:
    """The streams of a data set of the hub, by its card or else by its first rows.

    Raises UsageError if it is not clear what to use or labels have no names, and DataError if it
    cannot be streamed.
    """
    name, origin = ask.name, hub.origin_of(ask)
    if origin.builder == "imagefolder":
        raise DataError(
            f"{name} has a file for each image, which cannot be streamed; choose a data set of "
            "Parquet files, or leave --streaming out."
        )
    chosen = ask.splits(list(origin.files))
    check(ask, chosen)
    card = hub.card(ask)
    if card is None:
        with _from_hub(name):
            used, classes = _detected(ask, _opened(origin, chosen["train"]))
    else:
        used, classes = card.columns, card.classes
    of_classes(name, used.task)

    skipped: list[str] = []

    def stream(split: str) -> Stream:
        with _from_hub(name):
            found = _plain(_opened(origin, chosen[split]), used)
        return Stream(
            name,
            chosen[split],
            found,
            used.modality,
            labels.Labels.indices(classes),
            None,
            origin.counts.get(chosen[split]),
            ask.skip_bad,
            skipped,
            used.renamed,
        )

    return _splits({split: stream(split) for split in chosen}), used


@contextmanager
def _from_hub(name: str) -> Iterator[None]:
    """Turns any error of the block, which reads from the hub, into a MissingError about `name`."""
    try:
        yield
    except RazorError:
        raise
    except Exception as error:  # the libraries raise many kinds
        raise MissingError(
            f"{name} cannot be streamed from the hub ({reason(error)}); try again later, or leave "
            "--streaming out."
        ) from error


def _opened(origin: hub.Origin, split: str) -> "IterableDataset":
    from datasets import load_dataset

    files = [f"hf://datasets/{origin.repo}/{file}" for file in origin.files[split]]
    with cache.quiet_without_terminal():
        found: IterableDataset = load_dataset(
            origin.builder,
            data_files={"train": files},
            split="train",
            streaming=True,
            **origin.settings,
        )
    return found


def _plain(found: "IterableDataset", used: Columns) -> "IterableDataset":
    """The rows with the columns that are used, and with images that are not decoded."""
    from datasets import Image

    if used.image is not None:
        found = found.cast_column(used.image, Image(decode=False))
    return found.select_columns(list(used.renamed))


def _detected(ask: Ask, found: "IterableDataset") -> tuple[Columns, tuple[str, ...]]:
    """The columns and the names of the classes, by the types and the first rows."""
    name = ask.name
    kinds: Features = found._resolve_features().features
    images, classes, plain = parquet.typed(kinds)
    first = list(islice(found.select_columns(plain), SAMPLE)) if plain else []
    values = {column: [row.get(column) for row in first] for column in kinds}
    used = tasks.detect(ask, columns.Sample(values, images, classes))
    of_classes(name, used.task)
    hub.check_image(name, used, kinds, images)
    if used.label not in classes:
        raise UsageError(
            f"column {used.label} of {name} does not name its classes, which must be known before "
            "rows are streamed; choose a data set that does, or leave --streaming out."
        )
    return used, tuple(kinds[used.label].names)


def labeled(splits: Splits, ask: Ask) -> Splits:
    """The splits without a test split that has no labels, as in a contest, unless it is asked for.

    Reads its first row. Raises DataError if that cannot be read.
    """
    test = splits.test
    if ask.split is not None or splits.validation is None or not isinstance(test, Stream):
        return splits
    return splits if test.labeled else replace(splits, test=None)


def _splits(streams: Mapping[str, Stream]) -> Splits:
    train = streams["train"]
    return Splits(
        train, streams.get("validation"), streams.get("test"), train.labels.classes, train.skipped
    )
