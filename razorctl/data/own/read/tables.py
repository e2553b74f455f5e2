"""Tables: one file, or a folder with a file or several for each split."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from razorctl.data.own import labels, rows
from razorctl.data.own.ask import Ask, role, split_of
from razorctl.data.own.raw import NOT_UTF8, Raw
from razorctl.data.own.read import conversations, lines, parquet, recognition
from razorctl.data.own.read.columns import as_trained, unlabeled_columns
from razorctl.data.own.read.sample import SUFFIXES as IMAGE_SUFFIXES
from razorctl.data.own.read.sample import Sample
from razorctl.data.own.read.table_columns import TableColumns
from razorctl.errors import DataError, UsageError
from razorctl.folders import spelled
from razorctl.models import Modality

if TYPE_CHECKING:
    from datasets import Dataset

METADATA = "metadata"  # as the hub's sets of images call it
SUFFIXES = (*lines.READERS, ".parquet")


def is_table(file: Path, tagged: bool = False) -> bool:
    """Whether a file is a table; tagged: whether text files are known to have tokens with tags."""
    kinds = (*SUFFIXES, *lines.UNSAID) if tagged else SUFFIXES
    known = file.suffix.casefold() in kinds and os.path.isfile(file)  # noqa: PTH113
    return known or lines.of_tokens(file) is not None


def in_folder(folder: Path, tagged: bool = False) -> dict[str, list[Path]]:
    """Split -> its tables in a folder: of known splits, or a list of images, or its only table.

    A list of images is called METADATA, and lies beside them in the folder or in those of splits.
    An only table counts if there is at most one folder, since several may be classes. Empty if the
    folder has no such tables. tagged: as of `is_table`.
    """
    splits: dict[str, list[Path]] = {}
    here = sorted(folder.iterdir())
    folders = [path for path in here if path.is_dir() and path.name[0] != "."]
    files = [file for file in here if _may_be_table(file) and is_table(file, tagged)]
    # A JSON file beside other tables, or beside folders of images, says something of these.
    tables = [file for file in files if file.suffix.casefold() != ".json"]
    if not tables and not folders:
        tables = [file for file in files if lines.has_json_rows(file)]
    for file in tables:
        if spelled(file.name) != file.name:
            raise DataError(f"{folder / spelled(file.name)}: {NOT_UTF8}.")
        splits.setdefault(split_of(file), []).append(file)
    if any(map(role, splits)):
        return splits
    listed = {part.name: _lists(part) for part in folders if role(part.name) and _lists(part)}
    if any(role(split) == "train" for split in listed):
        return listed
    only = _lists(folder) or (tables if len(folders) < 2 else [])
    return {"train": only} if len(only) == 1 else {}


def _may_be_table(file: Path) -> bool:
    """Whether a file has an ending of tables, or is called as a split and may be one of tokens."""
    return file.suffix.casefold() in SUFFIXES or role(split_of(file)) is not None


def _lists(folder: Path) -> list[Path]:
    """The list of the images in a folder."""
    files = (folder / f"{METADATA}{ending}" for ending in (".csv", ".jsonl", ".parquet"))
    return [*filter(is_table, files)]


class Reader(Protocol):
    """A reader of tables of a kind: `lines` or `parquet`."""

    def sample(self, file: Path) -> Sample: ...
    def class_names(self, file: Path, columns: TableColumns) -> tuple[str, ...] | None: ...
    def rows(self, files: Sequence[Path], columns: TableColumns) -> "Dataset": ...


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
        return self.files["train"][0].suffix.casefold() in (".csv", ".tsv")


def find(ask: Ask, candidates: Mapping[str, Sequence[Path]], *, single: bool = False) -> Tables:
    """The tables that are used.

    Raises UsageError if it is not clear which columns or splits to use, and DataError if a table
    cannot be read.

    Args:
        ask: what is asked of the data.
        candidates: split as the folder calls it -> its tables.
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
    root = Path(os.path.commonpath([file.parent for file in every]))
    read = reader(every[0])
    first = read.sample(every[0])
    if not first.images and not any(map(len, first.values.values())):
        raise DataError(f"{every[0]} has no rows; give a file with rows.")
    columns = recognition.table_columns(as_trained(ask, first), first)
    samples = {file: read.sample(file) for file in every[1:]}
    files, left_out = _labeled(ask, files, first, samples, columns)
    every = [file for part in files.values() for file in part]
    for file in every[1:]:
        _check_columns(file, samples[file], columns)
    if columns.task == "segmentation":
        class_names = [labels.class_names_in(root)]
    else:
        class_names = [columns.class_names or read.class_names(file, columns) for file in every]
    if len(set(class_names)) > 1:
        raise DataError(
            f"the tables of {ask.name} number their classes otherwise; write them anew."
        )
    names = {split: part[0].name for split, part in files.items()}
    notes = recognition.notes(ask, first, columns)
    if kinds <= {".csv", ".tsv"}:
        notes += _header_note(every[0], first, columns)
    return Tables(files, names, columns, class_names[0], root, notes, left_out)


def raw(ask: Ask, tables: Tables) -> Raw:
    """The rows of tables; raises DataError if one cannot be read."""
    columns = tables.columns
    read = reader(tables.files["train"][0])
    splits = {split: read.rows(files, columns) for split, files in tables.files.items()}
    names = {**tables.names}
    details = columns.details + tables.left_out + rows.unlabeled_out(ask, splits, names)
    return Raw(
        name=ask.name,
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


def _labeled(
    ask: Ask,
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
        if lacking and ask.split is None:
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
