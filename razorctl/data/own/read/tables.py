"""Tables: one file, or a folder with a file or several for each split."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from razorctl import units
from razorctl.data.own import labels, rows
from razorctl.data.own.raw import RawRows
from razorctl.data.own.read import conversations, layout, lines, parquet, texts
from razorctl.data.own.read.folder import ARCHIVES
from razorctl.data.own.read.recognition import table_columns
from razorctl.data.own.read.refused import refuse_document
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


def at(request: DataRequest, path: Path) -> RawRows | None:
    """The rows of the tables at a path; None of a folder without tables.

    Raises what `raw` raises, and UsageError for a file that is no table.
    """
    name, tagged = request.name, request.task == "token-classification"
    if path.is_dir():
        files = layout.in_folder(path, tagged)
        return raw(request, files) if files else None
    if path.suffix.casefold() in ARCHIVES:
        what = "file" if path.with_suffix("").suffix not in ("", ".tar") else "folder"
        raise DataError(f"{name} is an archive; unpack it, and name the {what}.")
    if path.suffix.casefold() == ".json" and not lines.has_json_rows(path):
        raise refuse_document(request, path)
    if not layout.is_table(path, tagged):
        documents = texts.SUFFIXES if request.language is not None else ()
        kinds = ", ".join(s.removeprefix(".").upper() for s in (*documents, *layout.SUFFIXES))
        raise UsageError(f"{name} is no table of a known kind; give {kinds} or a folder of images.")
    return raw(request, {path.stem: [path]}, single=True)


def raw(
    request: DataRequest, candidates: Mapping[str, Sequence[Path]], *, single: bool = False
) -> RawRows:
    """The rows of the tables that are used.

    Raises UsageError if it is not clear which columns or splits to use, and DataError if a table
    cannot be read.

    candidates: split as the folder calls it -> its tables. single: whether it is one file, which is
    to be split whatever its name.
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
    class_names = _class_names(request.name, every, columns, root)
    names = {split: str(part[0].relative_to(root)) for split, part in files.items()}
    untyped = kinds <= {".csv", ".tsv"}
    if untyped:
        notes = (*columns.notes, *_header_note(every[0], first, columns))
        columns = replace(columns, notes=notes)
    more = {"class_names": class_names, "root": root, "untyped": untyped}
    return _rows(request, files, names, columns, left_out, **more)


def _class_names(
    name: str, files: Sequence[Path], columns: TableColumns, root: Path
) -> tuple[str, ...] | None:
    """The names of classes that files or types of labels have; raises DataError if they differ."""
    if columns.task == "segmentation":
        return labels.class_names_in(root)
    names = {columns.class_names or reader(file).class_names(file, columns) for file in files}
    if len(names) > 1:
        raise DataError(f"the tables of {name} number their classes otherwise; write them anew.")
    return names.pop()


def without_labels(request: DataRequest, file: Path, modality: Modality) -> RawRows:
    """The rows of one table, without labels, for a model of this modality; raises as `raw`."""
    table = Table.for_run(request, reader(file).sample(file))
    chats = request.task == "causal-lm"
    columns = conversations.columns_of(table, answered=False) if chats else None
    columns = columns or table.unlabeled_columns(modality)
    return _rows(request, {"test": [file]}, {"test": file.name}, columns, root=file.parent)


def _rows(
    request: DataRequest,
    files: Mapping[str, Sequence[Path]],
    names: dict[str, str],
    columns: TableColumns,
    left_out: str = "",
    **more: Any,
) -> RawRows:
    """The rows of the tables of each split; raises DataError if one cannot be read.

    names: split -> what it is called in the data. left_out: what to say of splits that are left
    out. more: other fields of `RawRows`.
    """
    first = next(iter(files.values()))
    read = reader(first[0])
    splits = {split: read.rows(part, columns) for split, part in files.items()}
    if columns.get("split"):
        total = len(splits["train"])
        splits, names = _by_column(request, first, splits["train"])
        left = total - sum(map(len, splits.values()))
        left_out += f", without {units.count(left, 'row')} of other splits" if left else ""
    details = columns.details(left_out + rows.unlabeled_out(request, splits, names))
    name, modality, task = request.name, columns.modality, columns.task
    return RawRows(name, modality, splits, names, details, task=task, notes=columns.notes, **more)


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
    """The tables of each split; tables that lack labels are left out unless they are asked for.

    Returns also what to say of that, as the end of a sentence.
    """
    used, left_out = {}, ""
    for split, part in files.items():
        lacking = split != "train" and any(
            _has_no_label(first, samples[file], columns) for file in part
        )
        if lacking and request.split is None:
            left_out += rows.WITHOUT.format(part[0].name)
        else:
            used[split] = part
    return used, left_out


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
