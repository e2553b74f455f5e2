"""Tables: one file, or a folder with a file or several for each split."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from razorctl.data import Splits
from razorctl.data.own import (
    columns,
    folder,
    labels,
    lines,
    notes,
    parquet,
    recognition,
    rows,
    stream,
)
from razorctl.data.own.ask import Ask, role, split_of
from razorctl.data.own.columns import Columns, Sample
from razorctl.data.own.raw import NOT_UTF8, Raw
from razorctl.data.own.store import stamp
from razorctl.errors import DataError, UsageError
from razorctl.folders import spelled
from razorctl.models import Modality

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, IterableDataset

SUFFIXES = (*lines.READERS, ".parquet")


def is_table(file: Path) -> bool:
    return file.suffix.casefold() in SUFFIXES and os.path.isfile(file)  # noqa: PTH113


def in_folder(folder: Path) -> dict[str, list[Path]]:
    """Split -> its tables in a folder; empty if the folder has no table of a known split."""
    found: dict[str, list[Path]] = {}
    for file in sorted(filter(is_table, folder.iterdir())):
        if spelled(file.name) != file.name:
            raise DataError(f"{folder / spelled(file.name)}: {NOT_UTF8}.")
        found.setdefault(split_of(file), []).append(file)
    return found if any(map(role, found)) else {}


class Reader(Protocol):
    """What reads tables of a kind: `lines` or `parquet`."""

    def sample(self, file: Path) -> Sample: ...
    def class_names(self, file: Path, columns: Columns) -> tuple[str, ...] | None: ...
    def labels(self, file: Path, columns: Columns) -> "pa.ChunkedArray": ...
    def rows(self, files: Sequence[Path], columns: Columns) -> "Dataset": ...
    def records(self, file: Path, columns: Columns) -> Iterator[dict[str, Any]]: ...


def reader(file: Path) -> Reader:
    return parquet if file.suffix.casefold() == ".parquet" else lines


@dataclass(frozen=True)
class Tables:
    """The tables of each split, and what is known of them before their rows are read.

    splits: what each split is called in the data. class_names, untyped, notes: as in `Raw`. root:
    the folder that image paths are relative to.
    """

    files: Mapping[str, Sequence[Path]]
    splits: Mapping[str, str]
    columns: Columns
    class_names: tuple[str, ...] | None
    root: Path
    notes: tuple[str, ...] = ()

    @property
    def untyped(self) -> bool:
        return self.files["train"][0].suffix.casefold() in (".csv", ".tsv")


def find(ask: Ask, found: Mapping[str, Sequence[Path]], *, single: bool = False) -> Tables:
    """The tables that are used; `found` has the tables of each split, in one folder.

    single: whether it is one file, which is to be split whatever its name. Raises UsageError if it
    is not clear which columns or splits to use, and DataError if a table cannot be read.
    """
    if single:
        if ask.split is not None:
            raise UsageError(f"{ask.name} has no splits to choose from; leave --split out.")
        chosen = {"train": next(iter(found))}
    else:
        chosen = ask.splits(list(found))
    files = {split: found[own] for split, own in chosen.items()}
    every = [file for split in files.values() for file in split]
    kinds = {file.suffix.casefold() for file in every}
    if len(kinds) > 1:
        raise UsageError(
            f"{ask.name} has tables of several kinds, {', '.join(sorted(kinds))}; name one file, "
            "or choose with --split."
        )
    root = every[0].parent
    read = reader(every[0])
    first = read.sample(every[0])
    if not first.images and not any(map(len, first.values.values())):
        raise DataError(f"{every[0]} has no rows; give a file with rows.")
    used = recognition.detect(columns.as_trained(ask, first), first)
    for file in every[1:]:
        _check(file, read.sample(file), used)
    if used.task == "segmentation":
        class_names = [folder.class_names(root)]
    else:
        class_names = [read.class_names(file, used) for file in every]
    if len(set(class_names)) > 1:
        raise DataError(
            f"the tables of {ask.name} number their classes otherwise; write them anew."
        )
    called = {split: part[0].name for split, part in files.items()}
    told = notes.header(every[0], first, used) if kinds <= {".csv", ".tsv"} else ()
    return Tables(files, called, used, class_names[0], root, told)


def read(ask: Ask, tables: Tables) -> Raw:
    """The rows of tables; raises DataError if one cannot be read."""
    used = tables.columns
    rows = reader(tables.files["train"][0]).rows
    return Raw(
        ask.name,
        used.modality,
        {split: rows(part, used) for split, part in tables.files.items()},
        tables.splits,
        used.told,
        class_names=tables.class_names,
        untyped=tables.untyped,
        root=tables.root,
        task=used.task,
        notes=tables.notes,
    )


def streams(ask: Ask, tables: Tables) -> Splits:
    """The streams of tables, whose labels are read once before all else.

    Raises DataError if these are no classes, or those of the training rows are not enough.
    """
    import numpy as np
    from datasets import Dataset, IterableDataset
    from pyarrow import Table

    used = tables.columns
    stream.refuse_splits(ask, tables.files)
    stream.refuse_task(ask, used.task)
    found = {
        split: Dataset(Table.from_arrays([_labels(tuple(part), used, stamp(part))], ["label"]))
        for split, part in tables.files.items()
    }
    raw = Raw(
        *(ask.name, used.modality, found, tables.splits, used.told),
        class_names=tables.class_names,
        untyped=tables.untyped,
    )
    known = labels.of(raw)
    numbers = {split: known.numbers(of.data.column("label")) for split, of in found.items()}
    labeled = {split: np.flatnonzero(of >= 0) for split, of in numbers.items()}
    rows.sound(raw, known.classes, numbers, labeled)

    def stored(split: str) -> "IterableDataset":
        settings = {"files": list(tables.files[split]), "used": used}
        return IterableDataset.from_generator(_records, gen_kwargs=settings)

    counts = {split: len(of) for split, of in found.items()}
    return stream.splits(ask, used, tables.splits, known, counts, stored, root=tables.root)


@lru_cache(maxsize=8)
def _labels(files: tuple[Path, ...], used: Columns, _: str) -> "pa.ChunkedArray":
    """The labels of files, which are read again if the last argument, their stamp, is another."""
    import pyarrow as pa

    parts = [reader(file).labels(file, used) for file in files]
    return pa.chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)


def _records(files: Sequence[Path], used: Columns) -> Iterator[dict[str, Any]]:
    for file in files:
        yield from reader(file).records(file, used)


def unlabeled(ask: Ask, file: Path, modality: Modality) -> Raw:
    """The rows of one table without labels, for a model of that modality; raises as `read`."""
    first = reader(file).sample(file)
    used = columns.unlabeled(columns.as_trained(ask, first), first, modality)
    own = {"rows": reader(file).rows([file], used)}
    return Raw(ask.name, modality, own, {"rows": file.name}, used.told, root=file.parent)


def _check(file: Path, sample: Sample, used: Columns) -> None:
    """Raises DataError if a table lacks a column that the first one has."""
    for column in used.renamed:
        if column not in sample.values:
            raise DataError(
                f"{file} has no column {column}, only {', '.join(sample.values)}; give all tables "
                "the same columns."
            )
