"""Rows in memory as Parquet files: whatever reads tables reads them."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import file_digest, sha256
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

from razorctl.data.own.read.column import SUFFIXES
from razorctl.errors import (
    ArgumentTypeError,
    DataError,
    RazorError,
    UsageError,
    raise_lack,
    reason_of,
)
from razorctl.system import atomic, hub

if TYPE_CHECKING:
    from datasets import Dataset

KINDS = "a pandas DataFrame, a datasets.Dataset, or a list of rows (dicts) or of PIL images"
FOLDER = re.compile(r"rows-[0-9a-f]{16}")
BATCH = 100  # rows
NAME = "the table in memory"  # their name in sentences and documents


def is_a(value: Any, module: str, name: str) -> bool:
    """Whether a value is of a class of a library, which is not imported for that."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)


def stored(data: Any) -> Path:
    """The folder in the cache of data sets that has these rows, with a table for each split.

    Images are in the tables, since a table may not name files outside its folder.

    Its name is a digest of the rows, so that equal rows have one folder, which a run can be resumed
    from. Raises ArgumentTypeError for data of another kind, DataError for values that a table
    cannot have, and UsageError if the cache cannot be written.
    """
    splits = _splits(data)
    cache = hub.cached("")
    with atomic.writing(cache, "folder", "HF_DATASETS_CACHE"):
        cache.mkdir(parents=True, exist_ok=True)
        with atomic.scratch(cache) as partial:
            digest = sha256()
            for name, rows in splits.items():
                file = partial / f"{name}.parquet"
                _write(rows, file)
                with file.open("rb") as written:
                    digest.update(name.encode() + file_digest(written, "sha256").digest())
            folder = cache / f"rows-{digest.hexdigest()[:16]}"
            if not folder.exists():
                partial.rename(folder)
    return folder


def is_folder(path: Path) -> bool:
    """Whether `stored` names a folder so; it may have been removed."""
    return FOLDER.fullmatch(path.name) is not None and path.parent.name == "razorctl"


@contextmanager
def lent(data: Any) -> Iterator[Path]:
    """Yields a table of these rows, which is removed after the block; raises as `stored`.

    Errors of the block call the table NAME.
    """
    splits = _splits(data)
    name, *others = splits
    if others:
        raise ArgumentTypeError(
            f"the data have the splits {', '.join(splits)}; give one, such as data[{name!r}]."
        )
    with atomic.scratch(Path(gettempdir())) as folder:
        file = folder / "rows.parquet"
        _write(splits[name], file)
        try:
            yield file
        except RazorError as error:
            error.args = (str(error).replace(str(file), NAME), *error.args[1:])
            raise


def _splits(data: Any) -> Mapping[str, "Dataset"]:
    """Name of a split -> its rows; the name is train if there is one split without a name."""
    if is_a(data, "datasets", "DatasetDict"):
        return dict(data)
    if is_a(data, "datasets", "Dataset"):
        return {"train": data}
    if is_a(data, "pandas", "DataFrame"):
        columns = {
            str(name): data[name].astype(object).where(data[name].notna(), None).tolist()
            for name in data.columns
        }
        return {"train": _of_columns(columns)}
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        if not data:
            raise UsageError("the data are an empty list; give some rows.")
        if all(is_a(row, "PIL.Image", "Image") for row in data):
            return {"train": _of_columns({"image": data})}
        if all(isinstance(row, Mapping) for row in data):
            names = dict.fromkeys(name for row in data for name in row)
            columns = {str(name): [row.get(name) for row in data] for name in names}
            return {"train": _of_columns(columns)}
    kind = type(data).__name__
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        kind += f" of {' and '.join(sorted({type(row).__name__ for row in data}))}"
    raise ArgumentTypeError(f"data cannot be of type {kind}; give a path, {KINDS}.")


def _of_columns(columns: Mapping[str, Sequence[Any]]) -> "Dataset":
    """The rows of columns; columns of paths of images are images."""
    import datasets
    import pyarrow as pa
    from datasets import Dataset, Features
    from datasets.table import table_cast

    paths = [name for name, values in columns.items() if _are_paths(values)]
    whole = {
        name: [value and str(Path(value).absolute()) for value in columns[name]] for name in paths
    }
    try:
        rows = Dataset.from_dict({**columns, **whole})
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"the data cannot be a table ({reason_of(error)}); give each column values of one type."
        ) from None
    features = Features({**rows.features, **{name: datasets.Image() for name in paths}})
    # `Dataset.cast` would show a bar.
    return Dataset(table_cast(rows.data.table, features.arrow_schema)) if paths else rows


def _are_paths(values: Sequence[Any]) -> bool:
    present = [value for value in values if value is not None]
    if not present or not all(isinstance(each, (str, os.PathLike)) for each in present):
        return False
    return all(Path(each).suffix.casefold() in SUFFIXES for each in present)


def _write(rows: "Dataset", file: Path) -> None:
    """Writes the rows, with the types of `datasets` and the contents of images, as Parquet."""
    from datasets.table import embed_table_storage
    from pyarrow.parquet import ParquetWriter

    schema = rows.features.arrow_schema
    with ParquetWriter(file, schema) as writer:
        batches: Iterable[Any] = rows.with_format("arrow").iter(batch_size=BATCH)
        for batch in batches:
            try:
                whole = embed_table_storage(batch.cast(schema))
            except OSError as error:
                raise_lack(error)
                raise DataError(
                    f"{error.filename or 'an image'} of {NAME} cannot be read; give paths of files."
                ) from None
            writer.write_table(whole)
