"""Any data set of the Hugging Face hub whose files `datasets` can read; its code is never run."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from razorctl import hub
from razorctl.config.registry import unknown
from razorctl.data.own.ask import Ask
from razorctl.data.own.fields import FIELDS
from razorctl.data.own.raw import Raw, RawStreams
from razorctl.data.own.read import columns, parquet, recognition
from razorctl.data.own.read.columns import Sample, TableColumns
from razorctl.errors import DataError, MissingError, RazorError, UsageError, reason_of
from razorctl.tasks import LANGUAGE

if TYPE_CHECKING:
    from datasets import Dataset, Features, IterableDataset

PREFIX = "hf:"
NAME = re.compile(r"hf:([\w.-]+/[\w.-]+?)(?::([\w.-]+))?")
CARD = "README.md"
# The readers of `datasets` that unpack no objects of Python and no archives.
STREAMED = 100  # rows of a stream that columns are detected from
BUILDERS = ("parquet", "arrow", "csv", "json", "imagefolder")


@dataclass(frozen=True)
class Origin:
    """How `datasets` reads a repository.

    builder: the name of its reader. files: split -> paths in the repository. settings: what the
    repository says of the reader. features: the columns and their types as its card has them, None
    if it has none. counts: split -> rows, as far as the card says so.
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

    names: split -> what it is called in the data. counts: split -> rows, before any is held out.
    """

    columns: TableColumns
    classes: tuple[str, ...]
    names: Mapping[str, str]
    counts: Mapping[str, int]


def card(ask: Ask) -> DatasetCard | None:
    """The card of a data set, by which no data are fetched; None if it does not say enough.

    It must have the number of rows of all splits that are used, and types of columns by which it is
    clear which ones are, with names of the classes. Raises what `raw` raises.
    """
    origin = origin_of(ask)
    chosen = ask.splits(list(origin.files))
    if origin.features is None or not {*chosen.values()} <= origin.counts.keys():
        return None
    images, classes, _ = parquet.typed(origin.features)
    # Columns of text that only their content tells are not clear: a word stands for all of it.
    values = {name: _word(kind) for name, kind in origin.features.items()}
    sample = columns.Sample(values, images, classes)
    recognition.refuse_kinds(ask, sample)
    try:
        used = recognition.table_columns(ask, sample)
    except UsageError:
        return None  # the data may settle it, or say what is wrong
    label = used.get("label")
    if used.task in LANGUAGE and "classification" not in ask.tasks[:1]:
        names: tuple[str, ...] = ()
    elif label in classes and used.get("image") in (None, *images):
        names = tuple(origin.features[label].names)
    else:
        return None
    counts = {split: origin.counts[own] for split, own in chosen.items()}
    return DatasetCard(used, names, chosen, counts)


def _word(kind: Any) -> list[Any]:
    """A value that stands for those of a column, as far as its type says what they are."""
    if getattr(kind, "dtype", None) in ("string", "large_string"):
        return ["word"]
    if isinstance(kind, dict) or hasattr(kind, "languages"):
        return [{}]
    if type(kind).__name__ == "Audio":
        return [{"path": "sound.wav"}]
    return [[]] if isinstance(kind, list) or hasattr(kind, "feature") else []


def raw(ask: Ask) -> Raw:
    """The rows of a data set `hf:ORG/NAME` or `hf:ORG/NAME:CONFIG`.

    Only the files of the splits that are used are fetched. Raises MissingError if these cannot be
    found, UsageError if it is not clear what to use, and DataError if it cannot be read.
    """
    name, origin = ask.name, origin_of(ask)
    chosen = ask.splits(list(origin.files))
    files = {split: origin.files[own] for split, own in chosen.items()}
    wanted = hub.literally([file for split in files.values() for file in split])
    folder = hub.fetch(name, origin.repo, wanted, "dataset")
    with hub.reading(name, folder), hub.quiet_without_terminal():
        from datasets import load_dataset

        local = {split: [str(folder / file) for file in part] for split, part in files.items()}
        found = load_dataset(origin.builder, data_files=local, **origin.settings)
    return _raw(ask, found, chosen, folder)


def origin_of(ask: Ask) -> Origin:
    """Where a data set of the hub comes from, without its data; raises what `raw` raises."""
    name = ask.name
    parts = NAME.fullmatch(name)
    if parts is None:
        raise UsageError(f"{name} is not the name of a data set; write hf:ORG/NAME:CONFIG.")
    return _origin(name, parts[1], parts[2])


def streams(ask: Ask) -> RawStreams:
    """The rows of a data set of the hub as they are read, by its card or else by its first rows.

    Raises UsageError if it is not clear what to use or labels have no names, and DataError if it
    cannot be streamed.
    """
    import pyarrow as pa

    name, origin = ask.name, origin_of(ask)
    if origin.builder == "imagefolder":
        raise DataError(
            f"{name} has a file for each image, which cannot be streamed; choose a data set of "
            "Parquet files, or leave --streaming out."
        )
    chosen = ask.splits(list(origin.files))
    ask.check_streamed_splits(chosen)
    known = card(ask)
    if known is None:
        with _from_hub(name):
            used, classes = _detect_in_stream(ask, _opened(origin, chosen["train"]))
    else:
        used, classes = known.columns, known.classes
    ask.check_streamed_task(used.task)
    if classes is None:
        raise UsageError(
            f"column {used.get('label')} of {name} does not name its classes, which must be known "
            "before rows are streamed; choose a data set that does, or leave --streaming out."
        )

    def read(split: str) -> "IterableDataset":
        with _from_hub(name):
            return _undecoded(_opened(origin, chosen[split]), used)

    return RawStreams(
        modality=used.modality,
        names=chosen,
        details=used.details,
        classes=classes,
        labels=pa.array(range(len(classes)), pa.int64()),
        counts={split: origin.counts.get(own) for split, own in chosen.items()},
        rows=read,
        renamed=used.renamed,
    )


def _detect_in_stream(
    ask: Ask, stream: "IterableDataset"
) -> tuple[TableColumns, tuple[str, ...] | None]:
    """The columns and the classes as of `_detect`, by the first rows of a stream."""

    def first(plain: list[str]) -> dict[str, list[Any]]:
        rows = list(islice(stream.select_columns(plain), STREAMED))
        return {column: [row.get(column) for row in rows] for column in plain}

    kinds: Features = stream._resolve_features().features
    return _detect(ask, parquet.sampled(kinds, first), kinds)


@contextmanager
def _from_hub(name: str) -> Iterator[None]:
    """Turns any error of the block, which reads from the hub, into a MissingError about `name`."""
    try:
        yield
    except RazorError:
        raise
    except Exception as error:  # the libraries raise many kinds
        raise MissingError(
            f"{name} cannot be streamed from the hub ({reason_of(error)}); try again later, "
            "or leave --streaming out."
        ) from error


def _opened(origin: Origin, split: str) -> "IterableDataset":
    from datasets import load_dataset

    files = [f"hf://datasets/{origin.repo}/{file}" for file in origin.files[split]]
    with hub.quiet_without_terminal():
        found: IterableDataset = load_dataset(
            origin.builder,
            data_files={"train": files},
            split="train",
            streaming=True,
            **origin.settings,
        )
    return found


def _undecoded(stream: "IterableDataset", used: TableColumns) -> "IterableDataset":
    """The rows with the columns that are used, and with images that are not decoded."""
    from datasets import Image

    image = used.get("image")
    if image is not None:
        stream = stream.cast_column(image, Image(decode=False))
    return stream.select_columns(list(used.renamed))


def _detect(
    ask: Ask, sample: Sample, kinds: "Features"
) -> tuple[TableColumns, tuple[str, ...] | None]:
    """The columns that are used, and the names of the classes if the label's type has them."""
    used = recognition.table_columns(columns.as_trained(ask, sample), sample)
    for role, option in (("image", "--image-column"), ("mask", "--label-column")):
        column = used.get(role)
        if column is not None and column not in sample.images:
            raise UsageError(
                f"column {column} of {ask.name} has no images but {kinds[column]}; name another "
                f"with {option}."
            )
    label = used.get("label")
    return used, tuple(kinds[label].names) if label in sample.classes else None


def _raw(ask: Ask, found: Mapping[str, "Dataset"], chosen: dict[str, str], folder: Path) -> Raw:
    train = found["train"]
    kinds = train.features
    sample = parquet.sampled(kinds, lambda plain: train.select_columns(plain)[: columns.SAMPLE])
    used, classes = _detect(ask, sample, kinds)
    for split, own in chosen.items():
        if missing := set(used.renamed) - set(found[split].column_names):
            raise DataError(
                f"{own} of {ask.name} has no column {missing.pop()}; name other splits."
            )
    details = used.details
    label = used.get("label")
    if ask.split is None and label is not None:
        for split in [split for split in chosen if split != "train"]:
            if _without_labels(found[split], label):
                details += f", without {chosen.pop(split)}, which has no labels"
    return Raw(
        name=ask.name,
        modality=used.modality,
        splits={split: _rows(found[split], used) for split in chosen},
        names=chosen,
        details=details,
        class_names=classes,
        root=folder.parents[1],  # where the links of the hub's cache lead
        task=used.task,
    )


def _rows(split: "Dataset", used: TableColumns) -> "Dataset":
    """The columns that are used, as `Raw` calls them."""
    import datasets
    import pyarrow as pa

    rows = split.select_columns(list(used.renamed)).rename_columns(used.renamed)
    if used.get("messages") is None:
        return rows
    chunks = rows.data.column("messages").chunks
    messages = [FIELDS["messages"].of_array(chunk, Path())[0] for chunk in chunks]
    if all(new is old for new, old in zip(messages, chunks, strict=True)):
        return rows
    return datasets.Dataset(pa.table({"messages": pa.chunked_array(messages)}))


def _without_labels(rows: "Dataset", label: str) -> bool:
    """Whether no row has a label, as in the test split of a contest."""
    import pyarrow as pa

    if pa.types.is_nested(rows.data.schema.field(label).type):
        return False
    return set(rows.data.column(label).unique().to_pylist()) <= {None, -1, ""}


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
            known = get_dataset_config_names(str(here))
            default = get_dataset_default_config_name(str(here))
            if config is not None and config not in known:
                raise unknown(f"config of {PREFIX}{repo}", config, known)
            if config is None and default is None:
                raise UsageError(
                    f"{name} has several configs, {', '.join(known)}; name one, as in "
                    f"{name}:{known[0]}."
                )
            builder = load_dataset_builder(str(here), config)
            found = builder.config.data_files or {}
            parts = {
                str(split): tuple(Path(file).relative_to(here).as_posix() for file in listed)
                for split, listed in found.items()
            }
            kind = type(builder).__module__.rsplit(".", 1)[-1]
        if kind not in BUILDERS:
            raise DataError(
                f"{name} has files of the kind {kind}, which razorctl does not read; choose a data "
                f"set of {', '.join(BUILDERS)}."
            )
        info = builder.info
        rows = {split: part.num_examples for split, part in (info.splits or {}).items()}
        counts = {str(split): int(count) for split, count in rows.items() if count}
        return Origin(repo, kind, parts, _settings(builder), info.features, counts)


def _settings(builder: Any) -> dict[str, Any]:
    """What a repository's card sets otherwise than the reader of its files has it."""
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
    except (DatasetNotFoundError, DataFilesNotFoundError, FileNotFoundError, RuntimeError):
        if any(file.endswith(".py") for file in files):
            raise DataError(
                f"{name} needs code of its own, which razorctl never runs; choose a data set of "
                "files, or convert it to Parquet."
            ) from None
        raise DataError(
            f"{name} has no files that can be read, only {', '.join(files[:5])}; choose another "
            "data set."
        ) from None
