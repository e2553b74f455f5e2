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
from razorctl.data.own.read import captions, layout, texts
from razorctl.data.own.read.column import SUFFIXES as IMAGE_SUFFIXES
from razorctl.data.own.read.column import Columns
from razorctl.data.own.read.folder import ARCHIVES
from razorctl.data.own.read.lines import LineFile, has_json_rows
from razorctl.data.own.read.parquet import TypedFile
from razorctl.data.own.read.recognition import table_columns, unlabeled_columns
from razorctl.data.own.read.refused import refuse_document
from razorctl.data.own.read.table_columns import TableColumns
from razorctl.data.own.request import DataRequest, role_in
from razorctl.data.own.store import stored_rows
from razorctl.errors import DataError, UsageError
from razorctl.models import Modality

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset


SPLIT_COLUMNS = ("split", "subset", "partition", "data_split", "dataset_split")


class TableFile(Protocol):
    """A file with a table: a `LineFile` or a `TypedFile`."""

    @property
    def path(self) -> Path: ...
    @property
    def columns(self) -> Columns: ...
    @property
    def names(self) -> Sequence[str]: ...
    def rows(self) -> Iterator[Mapping[str, Any]]: ...
    def class_names(self, label: str | None) -> tuple[str, ...] | None: ...
    def schema(self, columns: TableColumns) -> "pa.Schema": ...
    def batches(self, columns: TableColumns, schema: "pa.Schema") -> Iterator["pa.RecordBatch"]: ...


def table_file(path: Path) -> TableFile:
    typed = path.suffix.casefold() in (".parquet", ".arrow")
    return TypedFile(path) if typed else LineFile(path)


def at(request: DataRequest, path: Path) -> RawRows | None:
    """The rows of the tables at a path; None of a folder without tables.

    Raises what `table_rows` raises, and UsageError for a file that is no table.
    """
    name, tagged = request.name, request.task == "token-classification"
    if path.is_dir():
        files = layout.in_folder(path, tagged)
        return table_rows(request, files) if files else None
    if path.suffix.casefold() in ARCHIVES:
        what = "file" if path.with_suffix("").suffix not in ("", ".tar") else "folder"
        raise DataError(f"{name} is an archive; unpack it, and name the {what}.")
    if path.suffix.casefold() == ".json" and not has_json_rows(path):
        raise refuse_document(request, path)
    if not layout.is_table(path, tagged):
        documents = texts.SUFFIXES if request.language is not None else ()
        kinds = ", ".join(s.removeprefix(".").upper() for s in (*documents, *layout.SUFFIXES))
        raise UsageError(
            f"{name} is not a known kind of table; give {kinds} or a folder of images."
        )
    return table_rows(request, {path.stem: [path]}, single=True)


def table_rows(
    request: DataRequest, candidates: Mapping[str, Sequence[Path]], *, single: bool = False
) -> RawRows:
    """The rows of the tables that are used.

    Raises UsageError if it is not clear which columns or splits to use, and DataError if a table
    cannot be read.

    candidates: name of a split in the data -> its tables. single: whether the request names one
    file, which is split whatever its name.
    """
    files = {split: [*map(table_file, paths)] for split, paths in candidates.items()}
    first = next(iter(files.values()))[0]
    by_column = _split_column(request, first.columns) if len(files) == 1 else None
    if single or by_column:
        if request.split is not None and not by_column:
            raise UsageError(f"{request.name} has no splits to choose from; leave --split out.")
        names = {"train": next(iter(files))}
    else:
        names = request.splits(list(files))
    unused = [] if request.split else [name for name in files if name not in names.values()]
    files = {split: files[name] for split, name in names.items()}
    every = [file for part in files.values() for file in part]
    kinds = {file.path.suffix.casefold() for file in every}
    if len(kinds) > 1:
        raise UsageError(
            f"{request.name} has tables of several kinds, {', '.join(sorted(kinds))}; name one "
            "file, or choose with --split."
        )
    root, first = Path(os.path.commonpath([file.path.parent for file in every])), every[0]
    if not any(column.values or column.holds == "images" for column in first.columns.values()):
        raise DataError(f"{first.path} has no rows; give a file with rows.")
    others = {name: column for name, column in first.columns.items() if name != by_column}
    columns = table_columns(request, others)
    if by_column:
        columns = replace(columns, roles=(*columns.roles, ("split", by_column)))
    files, left_out = _labeled(request, files, columns)
    left_out += f", without {', '.join(unused)}" if unused else ""
    untyped = kinds <= {".csv", ".tsv"}
    if untyped:
        columns = replace(columns, notes=(*columns.notes, *_header_note(first, columns)))
    class_names = _class_names(request.name, files, columns, root)
    names = {split: str(part[0].path.relative_to(root)) for split, part in files.items()}
    rows = _rows(request, files, names, columns, left_out)
    return replace(rows, class_names=class_names, root=root, untyped=untyped)


def _class_names(
    name: str, files: Mapping[str, Sequence[TableFile]], columns: TableColumns, root: Path
) -> tuple[str, ...] | None:
    """The names of classes that files or types of labels have; raises DataError if they differ."""
    if columns.task == "segmentation":
        return labels.class_names_in(root)
    every = (file for part in files.values() for file in part)
    names = {columns.class_names or file.class_names(columns.answer) for file in every}
    if len(names) > 1:
        raise DataError(
            f"the tables of {name} number their classes differently; write all with one numbering."
        )
    return names.pop()


def unlabeled_rows(request: DataRequest, path: Path, modality: Modality | None) -> RawRows:
    """The rows of a table without labels, for a model of this modality; raises as `table_rows`.

    modality: None for one that embeds images and texts; the columns then tell.
    """
    file = table_file(path)
    modality = modality or captions.modality_of(request, file.columns)
    columns = unlabeled_columns(request, file.columns, modality)
    rows = _rows(request, {"test": [file]}, {"test": path.name}, columns)
    return replace(rows, root=path.parent)


def _rows(
    request: DataRequest,
    files: Mapping[str, Sequence[TableFile]],
    names: dict[str, str],
    columns: TableColumns,
    left_out: str = "",
) -> RawRows:
    """The rows of the tables of each split; raises DataError if one cannot be read.

    names: split -> its name in the data. left_out: words on splits that are left out.
    """
    splits = {split: _stored(part, columns) for split, part in files.items()}
    if columns.get("split"):
        total = len(splits["train"])
        splits, names = _by_column(request, files["train"], splits["train"])
        left = total - sum(map(len, splits.values()))
        left_out += f", without {units.count(left, 'row')} of other splits" if left else ""
    return columns.raw_rows(request, splits, names, left_out)


def _stored(files: Sequence[TableFile], columns: TableColumns) -> "Dataset":
    schema = files[0].schema(columns)

    def batches() -> Iterator["pa.RecordBatch"]:
        for file in files:
            yield from file.batches(columns, schema)

    return stored_rows([file.path for file in files], schema, batches, columns)


def _split_column(request: DataRequest, columns: Columns) -> str | None:
    """The column of a table with the split of each row; None if there is none."""
    options = (request.label_column, request.text_column, request.image_column)
    for name, column in columns.items():
        texts = column.texts if column.key in SPLIT_COLUMNS else []
        if name not in options and "train" in map(role_in, texts):
            return name
    return None


def _by_column(
    request: DataRequest, files: Sequence[TableFile], rows: "Dataset"
) -> tuple[dict[str, "Dataset"], dict[str, str]]:
    """The rows of each split by the column `split`, and the name of each split there."""
    import pyarrow.compute as pc

    names = request.splits([name for name in rows.unique("split") if name])

    def batches(name: str) -> Iterator["pa.RecordBatch"]:
        for batch in rows.data.table.to_batches():
            yield batch.filter(pc.equal(batch.column("split"), name))

    schema, paths = rows.data.schema, [file.path for file in files]
    return {
        split: stored_rows(paths, schema, partial(batches, name), schema.names, name)
        for split, name in names.items()
    }, names


def _labeled(
    request: DataRequest, files: Mapping[str, list[TableFile]], columns: TableColumns
) -> tuple[dict[str, list[TableFile]], str]:
    """The tables of each split, and words on splits that are left out.

    Tables without labels are left out unless --split names them. Raises DataError if a table lacks
    a column that the first one has.
    """
    used, left_out = {}, ""
    first = next(iter(files.values()))[0].columns
    for split, part in files.items():
        lacking = split != "train" and any(_has_no_label(first, f.columns, columns) for f in part)
        if lacking and request.split is None:
            left_out += rows.WITHOUT.format(part[0].path.name)
        else:
            used[split] = part
    for file in (file for part in used.values() for file in part):
        for name in columns.renamed:
            if name not in file.columns:
                raise DataError(
                    f"{file.path} has no column {name}, only {', '.join(file.columns)}; give all "
                    "tables the same columns."
                )
    return used, left_out


def _has_no_label(first: Columns, others: Columns, columns: TableColumns) -> bool:
    """Whether a table lacks exactly the columns of labels, as tests of contests do.

    A column that the first table lacks may be the label under another name.
    """
    absent = {role for name, role in columns.renamed.items() if name not in others}
    labels = {*filter(rows.is_label, columns.renamed.values())}
    return bool(absent) and absent == labels and others.keys() <= first.keys()


def _header_note(file: TableFile, columns: TableColumns) -> tuple[str, ...]:
    """A note on a table whose header may be its first row."""
    label, image = columns.get("label"), columns.get("image")
    if label is not None and label in map(str, file.columns[label].values):
        sign = f"{label!r} is a label of other rows"
    elif image is not None and Path(image).suffix.casefold() in IMAGE_SUFFIXES:
        sign = f"{image!r} is an image"
    else:
        return ()
    return (f"the first line of {file.path} looks like a row, not like a header: {sign}.",)
