"""Any data set of the Hugging Face hub whose files `datasets` can read; its code is never run."""

import glob
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from razorctl.config.tasks import LANGUAGE
from razorctl.data.own import chats, rows
from razorctl.data.own.raw import RawRows
from razorctl.data.own.read import parquet
from razorctl.data.own.read.column import SAMPLE, columns_of
from razorctl.data.own.read.recognition import table_columns
from razorctl.data.own.read.refused import refuse_table
from razorctl.data.own.read.table import Table
from razorctl.data.own.read.table_columns import TableColumns
from razorctl.data.own.request import DataRequest
from razorctl.data.own.store import stored_rows
from razorctl.errors import DataError, UsageError, raise_lack
from razorctl.registry import unknown
from razorctl.system import hub

if TYPE_CHECKING:
    from datasets import Dataset, Features

PREFIX = "hf:"
NAME = re.compile(r"hf:([\w.-]+/[\w.-]+?)(?::([\w.-]+))?")
CARD = "README.md"
# Columns whose values rows may have otherwise.
CONVERTED = (*chats.PARTS, "number", "labels", "flag", "tokens", "tags")
# The readers of `datasets` that unpack no objects of Python and no archives.
BUILDERS = ("parquet", "arrow", "csv", "json", "imagefolder")


@dataclass(frozen=True)
class Origin:
    """How `datasets` reads a repository.

    Args:
        repo: the name of the repository.
        builder: the name of its reader.
        files: split -> paths in the repository.
        settings: the arguments of the reader that the repository sets.
        features: the columns and their types as its card has them; None if it has none.
        counts: split -> rows, as far as the card says so.
    """

    repo: str
    builder: str
    files: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, Any]
    features: "Features | None"
    counts: Mapping[str, int]


@dataclass(frozen=True)
class DatasetCard:
    """The part of a repository's card by which a data set can be planned for.

    classes: their names; none of texts alone. counts: split -> rows, before any is held out.
    """

    columns: TableColumns
    classes: tuple[str, ...]
    counts: Mapping[str, int]


def card(request: DataRequest) -> DatasetCard | None:
    """The card of a data set, by which no data are fetched; None if it does not say enough.

    It must have the number of rows of all splits that are used, and types of columns by which it is
    clear which ones are, with names of the classes. Raises what `raw` raises.
    """
    origin = origin_of(request)
    split_names = request.splits(list(origin.files))
    if origin.features is None or not {*split_names.values()} <= origin.counts.keys():
        return None
    types = parquet.types_of(origin.features)
    # Columns of text that only their content tells are not clear: a word stands for all of it.
    values = {name: _word(kind) for name, kind in origin.features.items()}
    table = Table(request, columns_of(values, types))
    refuse_table(table)
    try:
        columns = table_columns(table)
    except UsageError:
        return None  # the data may settle it, or say what is wrong
    label, names = columns.get("label"), tuple[str, ...]()
    image = columns.get("image")
    if types.get(label or "") == "classes" and (image is None or types.get(image) == "images"):
        names = tuple(origin.features[label].names)
    elif columns.task not in LANGUAGE or "classification" in request.tasks[:1]:
        return None
    counts = {split: origin.counts[name_in_data] for split, name_in_data in split_names.items()}
    return DatasetCard(columns, names, counts)


def _word(kind: Any) -> list[Any]:
    """A value that stands for all values of a column, as far as its type tells them."""
    if getattr(kind, "dtype", None) in ("string", "large_string"):
        return ["word"]
    if isinstance(kind, dict) or hasattr(kind, "languages"):
        return [{}]
    if type(kind).__name__ == "Audio":
        return [{"path": "sound.wav"}]
    return [[]] if isinstance(kind, list) or hasattr(kind, "feature") else []


def raw(request: DataRequest) -> RawRows:
    """The rows of a data set `hf:ORG/NAME` or `hf:ORG/NAME:CONFIG`.

    Only the files of the splits that are used are fetched. Raises MissingError if these cannot be
    found, UsageError if it is not clear what to use, and DataError if it cannot be read.
    """
    name, origin = request.name, origin_of(request)
    split_names = request.splits(list(origin.files))
    files = {split: origin.files[name_in_data] for split, name_in_data in split_names.items()}
    wanted = tuple(glob.escape(file) for split in files.values() for file in split)
    folder = hub.fetch(name, origin.repo, wanted, "dataset")
    with hub.reading(name, folder), hub.quiet_without_terminal():
        from datasets import load_dataset

        local = {split: [str(folder / file) for file in part] for split, part in files.items()}
        data = load_dataset(origin.builder, data_files=local, **origin.settings)
    return _raw(request, data, split_names, folder, local)


def origin_of(request: DataRequest) -> Origin:
    """Where a data set of the hub comes from, without its data; raises what `raw` raises."""
    name = request.name
    parts = NAME.fullmatch(name)
    if parts is None:
        raise UsageError(f"{name} is not the name of a data set; write hf:ORG/NAME:CONFIG.")
    return _origin(name, parts[1], parts[2])


def _columns(table: Table, kinds: "Features") -> TableColumns:
    """The columns that are used; raises UsageError for one of images that has none."""
    columns = table_columns(table)
    for role, option in (("image", "--image-column"), ("mask", "--label-column")):
        column = columns.get(role)
        if column is not None and table.columns[column].holds != "images":
            raise UsageError(
                f"column {column} of {table.request.name} has no images but {kinds[column]}; name "
                f"another with {option}."
            )
    return columns


def _raw(
    request: DataRequest,
    data: Mapping[str, "Dataset"],
    split_names: dict[str, str],
    folder: Path,
    files: Mapping[str, list[str]],
) -> RawRows:
    """The rows of splits that `datasets` has read from files in the folder."""
    train = data["train"]
    kinds = train.features
    plain = train.with_format("arrow")  # which decodes nothing: a list may be of images
    first = parquet.typed_columns(
        kinds, lambda names: plain.select_columns(names)[:SAMPLE].to_pydict()
    )
    columns = _columns(Table.for_run(request, first), kinds)
    label = columns.answer
    named = None if label is None else parquet.named_classes(kinds[label])
    for split, name_in_data in split_names.items():
        if absent := set(columns.renamed) - set(data[split].column_names):
            raise DataError(
                f"{name_in_data} of {request.name} has no column {absent.pop()}; name other splits."
            )
    splits = {split: _rows(data[split], columns, files[split]) for split in split_names}
    left_out = rows.unlabeled_out(request, splits, split_names)
    return RawRows(
        name=request.name,
        modality=columns.modality,
        splits=splits,
        names=split_names,
        details=columns.details(left_out),
        class_names=columns.class_names or named,
        root=folder.parents[1],  # where the links of the hub's cache lead
        task=columns.task,
        notes=columns.notes,
    )


def _rows(split: "Dataset", columns: TableColumns, files: list[str]) -> "Dataset":
    """The columns that are used, as `RawRows` calls them; files: the files of the split."""
    import pyarrow as pa

    renamed = split.select_columns(list(columns.renamed)).rename_columns(columns.renamed)
    converted = any(name.partition(".")[0] in CONVERTED for name in renamed.column_names)
    if not (len(renamed) and converted):
        return renamed

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in renamed.data.table.to_batches():
            arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
            yield pa.RecordBatch.from_pydict(parquet.row_arrays(arrays, Path()))

    return stored_rows([*map(Path, files)], next(batches()).schema, batches, columns)


def _origin(name: str, repo: str, config: str | None) -> Origin:
    """How `datasets` reads a repository, found by the names of its files and by its card."""
    from datasets import (
        get_dataset_config_names,
        get_dataset_default_config_name,
        load_dataset_builder,
    )

    files = hub.listing(name, repo)
    card = hub.fetch(name, repo, (CARD,), "dataset") / CARD if CARD in files else None
    # datasets looks at names and at the card alone, so empty files stand in for the real ones.
    with TemporaryDirectory() as folder:
        here = Path(folder).resolve()
        for file in files:
            if ".." in Path(file).parts or Path(file).is_absolute():
                raise DataError(f"{name} has a file named {file}; choose another data set.")
            (here / file).parent.mkdir(parents=True, exist_ok=True)
            (here / file).touch()
        if card is not None:
            (here / CARD).write_bytes(card.read_bytes())
        with _resolving(name, files):
            configs = get_dataset_config_names(str(here))
            default = get_dataset_default_config_name(str(here))
            if config is not None and config not in configs:
                raise unknown(f"config of {PREFIX}{repo}", config, configs)
            if config is None and default is None:
                raise UsageError(
                    f"{name} has several configs, {', '.join(configs)}; name one, as in "
                    f"{name}:{configs[0]}."
                )
            builder = load_dataset_builder(str(here), config)
            paths = {
                str(split): tuple(Path(file).relative_to(here).as_posix() for file in part)
                for split, part in (builder.config.data_files or {}).items()
            }
            kind = type(builder).__module__.rsplit(".", 1)[-1]
        if kind not in BUILDERS:
            raise DataError(
                f"{name} has files of the kind {kind}, which razorctl does not read; choose a data "
                f"set of {', '.join(BUILDERS)}."
            )
        info = builder.info
        sizes = {split: part.num_examples for split, part in (info.splits or {}).items()}
        counts = {str(split): int(count) for split, count in sizes.items() if count}
        return Origin(repo, kind, paths, _settings(builder), info.features, counts)


def _settings(builder: Any) -> dict[str, Any]:
    """The arguments of the reader that a repository's card sets, if they are not its defaults."""
    ours = ("name", "version", "data_dir", "data_files", "description")
    settings = {
        field.name: getattr(builder.config, field.name)
        for field in fields(builder.config)
        if field.name not in ours
    }
    plain = type(builder.config)()
    settings = {key: value for key, value in settings.items() if value != getattr(plain, key)}
    if builder.info.features is not None and type(builder).__name__ in ("Csv", "Json"):
        settings["features"] = builder.info.features
    return settings


@contextmanager
def _resolving(name: str, files: list[str]) -> Iterator[None]:
    """Says which data sets need code and which have no files that `datasets` knows."""
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError

    try:
        yield
    except (DatasetNotFoundError, DataFilesNotFoundError, FileNotFoundError, RuntimeError) as error:
        raise_lack(error)
        if any(file.endswith(".py") for file in files):
            raise DataError(
                f"{name} needs code of its own, which razorctl never runs; choose a data set of "
                "files, or convert it to Parquet."
            ) from None
        raise DataError(
            f"{name} has no files that can be read, only {', '.join(files[:5])}; choose another "
            "data set."
        ) from None
