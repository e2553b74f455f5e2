"""Tables: one file, or a folder with a file or several for each split."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from razorctl import units
from razorctl.data.own import labels, rows
from razorctl.data.own.raw import RawRows
from razorctl.data.own.read import conversations, lines, parquet
from razorctl.data.own.read.recognition import number_notes, table_columns
from razorctl.data.own.read.sample import SUFFIXES as IMAGE_SUFFIXES
from razorctl.data.own.read.sample import Sample, normalized_name
from razorctl.data.own.read.table import Table
from razorctl.data.own.read.table_columns import TableColumns
from razorctl.data.own.request import DataRequest, role_in
from razorctl.data.own.store import stored_rows
from razorctl.errors import DataError, UsageError
from razorctl.models import Modality

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset


SPLIT_COLUMNS = ("split", "subset", "partition", "data_split", "dataset_split")


class Reader(Protocol):
    """A reader of tables of a kind: `lines` or `parquet`."""

    def sample(self, file: Path) -> Sample: ...
    def class_names(self, file: Path, columns: TableColumns) -> tuple[str, ...] | None: ...
    def rows(self, files: Sequence[Path], columns: TableColumns) -> "Dataset": ...


def reader(file: Path) -> Reader:
    return parquet if file.suffix.casefold() in (".parquet", ".arrow") else lines


@dataclass(frozen=True)
class Tables:
    """The tables of each split, and what is known of them before their rows are read.

    Args:
        files: split -> its tables.
        names: split -> what it is called in the data.
        columns: the columns that are used.
        class_names: as of `RawRows`.
        root: the folder that image paths are relative to.
        notes: as of `RawRows`.
        left_out: what to say of splits that are left out, as the end of a sentence.
    """

    files: Mapping[str, Sequence[Path]]
    names: Mapping[str, str]
    columns: TableColumns
    class_names: tuple[str, ...] | None
    root: Path
    notes: tuple[str, ...] = ()
    left_out: str = ""

    @property
    def untyped(self) -> bool:
        """Whether labels are text only because the files have no other type."""
        return self.first.suffix.casefold() in (".csv", ".tsv")

    @property
    def first(self) -> Path:
        return next(iter(self.files.values()))[0]


def find(
    request: DataRequest, candidates: Mapping[str, Sequence[Path]], *, single: bool = False
) -> Tables:
    """The tables that are used.

    Raises UsageError if it is not clear which columns or splits to use, and DataError if a table
    cannot be read.

    Args:
        request: what is asked of the data.
        candidates: split as the folder calls it -> its tables.
        single: whether it is one file, which is to be split whatever its name.
    """
    only = next(iter(candidates.values()))[0] if len(candidates) == 1 else None
    sample = None if only is None else reader(only).sample(only)
    by_column = None if sample is None else _split_column(request, sample)
    if single or by_column:
        if request.split is not None and not by_column:
            raise UsageError(f"{request.name} has no splits to choose from; leave --split out.")
        splits = {"train": next(iter(candidates))}
    else:
        splits = request.splits(list(candidates))
    files = {split: candidates[name] for split, name in splits.items()}
    every = [file for split in files.values() for file in split]
    kinds = {file.suffix.casefold() for file in every}
    if len(kinds) > 1:
        raise UsageError(
            f"{request.name} has tables of several kinds, {', '.join(sorted(kinds))}; name one "
            "file, or choose with --split."
        )
    root = Path(os.path.commonpath([file.parent for file in every]))
    read = reader(every[0])
    first = read.sample(every[0]) if sample is None else sample
    if not first.images and not any(map(len, first.values.values())):
        raise DataError(f"{every[0]} has no rows; give a file with rows.")
    table = Table.for_run(request, first)
    rest = {name: values for name, values in first.values.items() if name != by_column}
    columns = table_columns(replace(table, sample=replace(first, values=rest)))
    if by_column:
        columns = replace(columns, roles=(*columns.roles, ("split", by_column)))
    samples = {file: read.sample(file) for file in every[1:]}
    files, left_out = _labeled(request, files, first, samples, columns)
    if unused := [name for name in candidates if not request.split and name not in splits.values()]:
        left_out += f", without {', '.join(unused)}"
    every = [file for part in files.values() for file in part]
    for file in every[1:]:
        _check_columns(file, samples[file], columns)
    if columns.task == "segmentation":
        class_names = [labels.class_names_in(root)]
    else:
        class_names = [columns.class_names or read.class_names(file, columns) for file in every]
    if len(set(class_names)) > 1:
        raise DataError(
            f"the tables of {request.name} number their classes otherwise; write them anew."
        )
    names = {split: str(part[0].relative_to(root)) for split, part in files.items()}
    notes = number_notes(table, columns)
    if kinds <= {".csv", ".tsv"}:
        notes += _header_note(every[0], first, columns)
    return Tables(files, names, columns, class_names[0], root, notes, left_out)


def raw(request: DataRequest, tables: Tables) -> RawRows:
    """The rows of tables; raises DataError if one cannot be read."""
    columns = tables.columns
    read = reader(tables.first)
    splits = {split: read.rows(files, columns) for split, files in tables.files.items()}
    names, details = {**tables.names}, tables.left_out
    if columns.get("split"):
        total = len(splits["train"])
        splits, names = _by_column(request, tables.files["train"], splits["train"])
        left = total - sum(map(len, splits.values()))
        details += f", without {units.count(left, 'row')} of other splits" if left else ""
    details = columns.details(details + rows.unlabeled_out(request, splits, names))
    return RawRows(
        name=request.name,
        modality=columns.modality,
        splits=splits,
        names=names,
        details=details,
        class_names=tables.class_names,
        untyped=tables.untyped,
        root=tables.root,
        task=columns.task,
        notes=tables.notes,
    )


def without_labels(request: DataRequest, file: Path, modality: Modality) -> Tables:
    """One table whose labels are not read, as a test split, for a model of this modality.

    Raises what `find` raises.
    """
    table = Table.for_run(request, reader(file).sample(file))
    chats = request.task == "causal-lm"
    columns = conversations.columns_of(table, answered=False) if chats else None
    columns = columns or table.unlabeled_columns(modality)
    return Tables({"test": [file]}, {"test": file.name}, columns, None, file.parent)


def _split_column(request: DataRequest, sample: Sample) -> str | None:
    """The column of a table that says the split of each row; None if there is none."""
    used = (request.label_column, request.text_column, request.image_column)
    for column in sample.values:
        values = sample.texts(column) if normalized_name(column) in SPLIT_COLUMNS else []
        if column not in used and "train" in map(role_in, values):
            return column
    return None


def _by_column(
    request: DataRequest, files: Sequence[Path], rows: "Dataset"
) -> tuple[dict[str, "Dataset"], dict[str, str]]:
    """The rows of each split that a column says, and what it is called there."""
    import pyarrow.compute as pc

    said = rows.unique("split")
    names = request.splits([name for name in said if name])

    def batches(name: str) -> Iterator["pa.RecordBatch"]:
        for batch in rows.data.table.to_batches():
            yield batch.filter(pc.equal(batch.column("split"), name))

    schema = rows.data.schema
    return {
        split: stored_rows(files, schema, partial(batches, name), schema.names, name)
        for split, name in names.items()
    }, names


def _labeled(
    request: DataRequest,
    files: dict[str, Sequence[Path]],
    first: Sample,
    samples: Mapping[Path, Sample],
    columns: TableColumns,
) -> tuple[dict[str, Sequence[Path]], str]:
    """The tables of each split without those that lack labels, unless they are asked for.

    Returns also what to say of that, as the end of a sentence.
    """
    found, left_out = {}, ""
    for split, part in files.items():
        lacking = split != "train" and any(
            _has_no_label(first, samples[file], columns) for file in part
        )
        if lacking and request.split is None:
            left_out += rows.WITHOUT.format(part[0].name)
        else:
            found[split] = part
    return found, left_out


def _has_no_label(first: Sample, sample: Sample, columns: TableColumns) -> bool:
    """Whether a table lacks all columns of labels alone, as tests of contests do.

    It has no column that the first table has not, as it has if the label is called otherwise.
    """
    absent = {name for column, name in columns.renamed.items() if column not in sample.values}
    labels = {*filter(rows.is_label, columns.renamed.values())}
    return bool(absent) and absent == labels and sample.values.keys() <= first.values.keys()


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
