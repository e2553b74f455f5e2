"""Tables: one file, or a folder with a file or several for each split."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from razorctl.data.own import labels, rows
from razorctl.data.own.ask import Ask, role, split_of
from razorctl.data.own.raw import NOT_UTF8, Raw, RawStreams
from razorctl.data.own.read import conversations, lines, parquet, recognition
from razorctl.data.own.read.columns import as_trained, unlabeled_columns
from razorctl.data.own.read.sample import SUFFIXES as IMAGE_SUFFIXES
from razorctl.data.own.read.sample import Sample
from razorctl.data.own.read.table_columns import TableColumns
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
    splits: dict[str, list[Path]] = {}
    here = sorted(folder.iterdir())
    files = [*filter(is_table, here)]
    # A JSON file beside other tables, or beside folders of images, says something of these.
    tables = [file for file in files if file.suffix.casefold() != ".json"]
    if not tables and not any(path.is_dir() and path.name[0] != "." for path in here):
        tables = [file for file in files if lines.has_json_rows(file)]
    for file in tables:
        if spelled(file.name) != file.name:
            raise DataError(f"{folder / spelled(file.name)}: {NOT_UTF8}.")
        splits.setdefault(split_of(file), []).append(file)
    return splits if any(map(role, splits)) else {}


class Reader(Protocol):
    """A reader of tables of a kind: `lines` or `parquet`."""

    def sample(self, file: Path) -> Sample: ...
    def class_names(self, file: Path, columns: TableColumns) -> tuple[str, ...] | None: ...
    def labels(self, file: Path, columns: TableColumns) -> "pa.ChunkedArray": ...
    def rows(self, files: Sequence[Path], columns: TableColumns) -> "Dataset": ...
    def records(self, file: Path, columns: TableColumns) -> Iterator[dict[str, Any]]: ...


def reader(file: Path) -> Reader:
    return parquet if file.suffix.casefold() == ".parquet" else lines


@dataclass(frozen=True)
class Tables:
    """The tables of each split, and what is known of them before their rows are read.

    Args:
        files: split -> its tables.
        names: split -> what it is called in the data.
        columns: the columns that are used.
        class_names: as of `Raw`.
        root: the folder that image paths are relative to.
        notes: as of `Raw`.
    """

    files: Mapping[str, Sequence[Path]]
    names: Mapping[str, str]
    columns: TableColumns
    class_names: tuple[str, ...] | None
    root: Path
    notes: tuple[str, ...] = ()

    @property
    def untyped(self) -> bool:
        """Whether labels are text only because the files have no other type."""
        return self.files["train"][0].suffix.casefold() in (".csv", ".tsv")


def find(ask: Ask, candidates: Mapping[str, Sequence[Path]], *, single: bool = False) -> Tables:
    """The tables that are used.

    Raises UsageError if it is not clear which columns or splits to use, and DataError if a table
    cannot be read.

    Args:
        ask: what is asked of the data.
        candidates: split as the folder calls it -> its tables, all in one folder.
        single: whether it is one file, which is to be split whatever its name.
    """
    if single:
        if ask.split is not None:
            raise UsageError(f"{ask.name} has no splits to choose from; leave --split out.")
        splits = {"train": next(iter(candidates))}
    else:
        splits = ask.splits(list(candidates))
    files = {split: candidates[name] for split, name in splits.items()}
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
    columns = recognition.table_columns(as_trained(ask, first), first)
    for file in every[1:]:
        _check_columns(file, read.sample(file), columns)
    if columns.task == "segmentation":
        class_names = [labels.class_names_in(root)]
    else:
        class_names = [columns.class_names or read.class_names(file, columns) for file in every]
    if len(set(class_names)) > 1:
        raise DataError(
            f"the tables of {ask.name} number their classes otherwise; write them anew."
        )
    names = {split: part[0].name for split, part in files.items()}
    notes = _header_note(every[0], first, columns) if kinds <= {".csv", ".tsv"} else ()
    return Tables(files, names, columns, class_names[0], root, notes)


def raw(ask: Ask, tables: Tables) -> Raw:
    """The rows of tables; raises DataError if one cannot be read."""
    columns = tables.columns
    read = reader(tables.files["train"][0])
    return Raw(
        name=ask.name,
        modality=columns.modality,
        splits={split: read.rows(files, columns) for split, files in tables.files.items()},
        names=tables.names,
        details=columns.details,
        class_names=tables.class_names,
        untyped=tables.untyped,
        root=tables.root,
        task=columns.task,
        notes=tables.notes,
    )


def streams(ask: Ask, tables: Tables) -> RawStreams:
    """The rows of tables as they are read; labels are read once before all else.

    Raises DataError if these are no classes, or those of the training rows are not enough.
    """
    import numpy as np
    from datasets import Dataset, IterableDataset
    from pyarrow import Table

    columns = tables.columns
    ask.check_streamed_task(columns.task)
    ask.check_streamed_splits(tables.files)
    label_rows = {
        split: Dataset(Table.from_arrays([_labels(tuple(part), columns, stamp(part))], ["label"]))
        for split, part in tables.files.items()
    }
    raw = Raw(
        name=ask.name,
        modality=columns.modality,
        splits=label_rows,
        names=tables.names,
        details=columns.details,
        class_names=tables.class_names,
        untyped=tables.untyped,
    )
    classes, numbers = labels.classes_of(raw), {}
    for split, column in label_rows.items():
        numbers[split] = classes.numbers(column.data.column("label"))
    rows_with_label = {split: np.flatnonzero(of >= 0) for split, of in numbers.items()}
    rows.check_enough(raw, classes.classes, numbers, rows_with_label)

    def read(split: str) -> "IterableDataset":
        settings = {"files": list(tables.files[split]), "columns": columns}
        return IterableDataset.from_generator(_records, gen_kwargs=settings)

    return RawStreams(
        modality=columns.modality,
        names=tables.names,
        details=columns.details,
        classes=classes.classes,
        labels=classes.values,
        counts={split: len(of) for split, of in label_rows.items()},
        rows=read,
        root=tables.root,
    )


@lru_cache(maxsize=8)
def _labels(files: tuple[Path, ...], columns: TableColumns, _: str) -> "pa.ChunkedArray":
    """The labels of files, which are read again if the last argument, their stamp, is another."""
    import pyarrow as pa

    parts = [reader(file).labels(file, columns) for file in files]
    return pa.chunked_array([chunk for part in parts for chunk in part.chunks], parts[0].type)


def _records(files: Sequence[Path], columns: TableColumns) -> Iterator[dict[str, Any]]:
    for file in files:
        yield from reader(file).records(file, columns)


def unlabeled(ask: Ask, file: Path, modality: Modality) -> Raw:
    """The rows of one table without labels, for a model of this modality; raises as `raw`."""
    read = reader(file)
    first = read.sample(file)
    asked = as_trained(ask, first)
    chat = conversations.columns_of(asked, first, answered=False)
    fed = chat is not None and ask.task == "causal-lm"
    columns = chat if chat and fed else unlabeled_columns(asked, first, modality)
    splits = {"test": read.rows([file], columns)}
    return Raw(ask.name, modality, splits, {"test": file.name}, columns.details, root=file.parent)


def _check_columns(file: Path, sample: Sample, columns: TableColumns) -> None:
    """Raises DataError if a table lacks a column that the first one has."""
    for column in columns.renamed:
        if column not in sample.values:
            raise DataError(
                f"{file} has no column {column}, only {', '.join(sample.values)}; give all tables "
                "the same columns."
            )


def _header_note(file: Path, sample: Sample, columns: TableColumns) -> tuple[str, ...]:
    """A note on a table whose header may be its first row."""
    label, image = columns.get("label"), columns.get("image")
    if label is not None and label in map(str, sample.values[label]):
        sign = f"{label!r} is a label of other rows"
    elif image is not None and Path(image).suffix.casefold() in IMAGE_SUFFIXES:
        sign = f"{image!r} is an image"
    else:
        return ()
    return (f"the first line of {file} looks like a row, not like a header: {sign}.",)
