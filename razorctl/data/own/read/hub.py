"""Data sets of the Hugging Face hub that `datasets` can read without running their code."""

import glob
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from razorctl.config.tasks import LANGUAGE
from razorctl.data.own import chats
from razorctl.data.own.raw import RawRows
from razorctl.data.own.read import parquet
from razorctl.data.own.read.column import SAMPLE, Columns, columns_of
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
# Columns whose values change when they become rows.
CONVERTED = (*chats.PARTS, "number", "labels", "flag", "tokens", "tags", "objects")
# The readers of `datasets` that load no pickles and unpack no archives.
BUILDERS = ("parquet", "arrow", "csv", "json", "imagefolder")


@dataclass(frozen=True)
class Origin:
    """How `datasets` reads a repository.

    Args:
        repo: the name of the repository.
        builder: the name of its reader.
        files: split -> paths in the repository.
        settings: the arguments of the reader in the repository's card.
        features: the columns and their types in the card; None without these.
        counts: split -> rows, for splits whose number is in the card.
    """

    repo: str
    builder: str
    files: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, Any]
    features: "Features | None"
    counts: Mapping[str, int]


@dataclass(frozen=True)
class DatasetCard:
    """The facts of a repository's card that planning needs.

    classes: their names; none for texts alone. counts: split -> rows, before any is held out.
    """

    columns: TableColumns
    classes: tuple[str, ...]
    counts: Mapping[str, int]


def card(request: DataRequest) -> DatasetCard | None:
    """The card of a data set, so that no data are fetched; None if it is not complete.

    A complete card has the number of rows of each split. Its types of columns show which columns to
    use, and have the names of the classes. Raises what `hub_rows` raises.
    """
    origin = origin_of(request)
    split_names = request.splits(list(origin.files))
    if origin.features is None or not {*split_names.values()} <= origin.counts.keys():
        return None
    types = parquet.types_of(origin.features)
    # Texts are unknown: one word stands for them, so only names and types tell a column's role.
    values = {name: _word(kind) for name, kind in origin.features.items()}
    table = columns_of(values, types)
    refuse_table(Table(request, table))
    try:
        columns = table_columns(request, table)
    except UsageError:
        return None  # the data may be clear, or have a better error
    label, names = columns.get("label"), tuple[str, ...]()
    image = columns.get("image")
    if types.get(label or "") == "classes" and (image is None or types.get(image) == "images"):
        names = tuple(origin.features[label].names)
    elif columns.task not in LANGUAGE or "classification" in request.tasks[:1]:
        return None
    counts = {split: origin.counts[name_in_data] for split, name_in_data in split_names.items()}
    return DatasetCard(columns, names, counts)


def _word(kind: Any) -> list[Any]:
    """A list with one value that stands for all of a column, by its type; empty for other types."""
    if getattr(kind, "dtype", None) in ("string", "large_string"):
        return ["word"]
    if isinstance(kind, dict) or hasattr(kind, "languages"):
        return [{}]
    if type(kind).__name__ == "Audio":
        return [{"path": "sound.wav"}]
    return [[]] if isinstance(kind, list) or hasattr(kind, "feature") else []


def hub_rows(request: DataRequest) -> RawRows:
    """The rows of a data set `hf:ORG/NAME` or `hf:ORG/NAME:CONFIG`.

    Only the files of the splits that are used are fetched. Raises MissingError if these cannot be
    found, UsageError if it is not clear what to use, and DataError if it cannot be read.
    """
    name, origin = request.name, origin_of(request)
    names = request.splits(list(origin.files))
    every = tuple(glob.escape(file) for split in names.values() for file in origin.files[split])
    folder = hub.fetch(name, origin.repo, every, "dataset")
    files = {
        split: [str(folder / file) for file in origin.files[in_data]]
        for split, in_data in names.items()
    }
    with hub.reading(name, folder), hub.quiet_without_terminal():
        from datasets import load_dataset

        data = load_dataset(origin.builder, data_files=files, **origin.settings)
    kinds = data["train"].features
    plain = data["train"].with_format("arrow")  # which decodes nothing: a list may be of images
    first = parquet.typed_columns(
        kinds, lambda columns: plain.select_columns(columns)[:SAMPLE].to_pydict()
    )
    columns = _columns(request, first, kinds)
    for split, in_data in names.items():
        if absent := set(columns.renamed) - set(data[split].column_names):
            raise DataError(f"{in_data} of {name} has no column {absent.pop()}; name other splits.")
    splits = {split: _rows(data[split], columns, files[split]) for split in names}
    label = columns.answer
    class_names = columns.class_names or (label and parquet.named_classes(kinds[label])) or None
    root = folder.parents[1]  # where the links of the hub's cache lead
    return replace(columns.raw_rows(request, splits, names), class_names=class_names, root=root)


def origin_of(request: DataRequest) -> Origin:
    """The origin of a data set of the hub, read without its data; raises what `hub_rows` raises."""
    name = request.name
    parts = NAME.fullmatch(name)
    if parts is None:
        raise UsageError(f"{name} is not the name of a data set; write hf:ORG/NAME:CONFIG.")
    return _origin(name, parts[1], parts[2])


def _columns(request: DataRequest, table: Columns, kinds: "Features") -> TableColumns:
    """The columns to use; raises UsageError if one of images or masks has other values."""
    columns = table_columns(request, table)
    for role, option in (("image", "--image-column"), ("mask", "--label-column")):
        column = columns.get(role)
        if column is not None and table[column].holds != "images":
            raise UsageError(
                f"column {column} of {request.name} has no images but {kinds[column]}; name "
                f"another with {option}."
            )
    return columns


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
    """How `datasets` reads a repository, by the names of its files and by its card."""
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
    """Turns errors of `datasets` in the block into a DataError: it needs code, or has no data."""
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
