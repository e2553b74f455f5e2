"""Rows of Parquet files, and of Arrow files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.data.own import chats
from razorctl.data.own.fields import field_of, worse
from razorctl.data.own.raw import Reasons
from razorctl.data.own.read.sample import SAMPLE, Sample
from razorctl.data.own.read.table_columns import TableColumns
from razorctl.data.own.store import stored_rows
from razorctl.errors import DataError, raise_lack, reason_of

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset, Features

BATCH = 100  # rows; a column of lists in a batch has 2 GB of text at most


class Arrow:
    """An Arrow file of `datasets`, with the interface of a Parquet file."""

    def __init__(self, file: Path) -> None:
        from datasets import Dataset

        self._table = Dataset.from_file(str(file)).data.table
        self.schema_arrow = self._table.schema

    def iter_batches(self, size: int, columns: list[str]) -> Iterator["pa.RecordBatch"]:
        yield from self._table.select(columns).to_batches(size)


def _open(file: Path) -> Any:
    from pyarrow.parquet import ParquetFile

    with _reading(file):
        return Arrow(file) if file.suffix == ".arrow" else ParquetFile(file, memory_map=True)


def features(file: Path) -> "Features":
    """The columns of a file and their types, as `datasets` marks them if it wrote the file."""
    from datasets import Features

    schema = _open(file).schema_arrow
    names = schema.names
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{file} has two columns named {twice[0]}; rename one.")
    return Features.from_arrow_schema(_plain(schema))


def _plain(schema: "pa.Schema") -> "pa.Schema":
    """The schema with categories of other libraries as what they stand for."""
    import pyarrow as pa

    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in schema
    ]
    return pa.schema(fields, schema.metadata)


def sample(file: Path) -> Sample:
    """The first rows of a file without its images; raises DataError if it cannot be read."""
    import pyarrow as pa

    def first(plain: list[str]) -> Mapping[str, list[Any]]:
        batches = [*islice(_read(file, plain), SAMPLE // BATCH)]
        return pa.Table.from_batches(batches).to_pydict() if batches else {}

    return sample_of(features(file), first, file.parent)


def sample_of(
    kinds: "Features",
    first: Callable[[list[str]], Mapping[str, Sequence[Any]]],
    root: Path | None = None,
) -> Sample:
    """The first rows of data without their images.

    kinds: the columns and their types. first: returns the first values of some columns. root: as of
    `Sample`.
    """
    images, classes, plain = typed(kinds)
    rows = first(plain) if plain else {}
    return Sample({name: rows.get(name, []) for name in kinds}, images, classes, root)


def typed(kinds: "Features") -> tuple[frozenset[str], frozenset[str], list[str]]:
    """The columns of images, of numbered classes, and of anything but images."""
    from datasets import ClassLabel, Image, Value

    def is_image(kind: Any) -> bool:
        if isinstance(kind, dict):  # what `datasets` has not written is not marked as an image
            return {"bytes", "path"} == set(kind)
        binary = isinstance(kind, Value) and kind.dtype in ("binary", "large_binary")
        return binary or isinstance(kind, Image)

    images = frozenset(name for name, kind in kinds.items() if is_image(kind))
    classes = frozenset(name for name, kind in kinds.items() if isinstance(kind, ClassLabel))
    return images, classes, [name for name in kinds if name not in images]


def rows(files: Sequence[Path], columns: TableColumns) -> "Dataset":
    """The rows of files with the columns of `RawRows`; image paths are relative to their folder."""
    schema = _schema(files[0], columns)
    return stored_rows(
        files, schema, lambda: (b for file in files for b in _batches(file, columns, schema))
    )


def class_names(file: Path, columns: TableColumns) -> tuple[str, ...] | None:
    """The names of the classes that the label's type has; None without them or a label."""
    label = columns.answer
    return None if label is None else named_classes(features(file)[label])


def named_classes(kind: Any) -> tuple[str, ...] | None:
    """The names of classes that a type of `datasets`, or of items of its lists, has; else None."""
    names = getattr(getattr(kind, "feature", kind), "names", None)
    return None if names is None else tuple(names)


def _schema(file: Path, columns: TableColumns) -> "pa.Schema":
    """The columns of `RawRows`, with a `fault` if images are named by paths."""
    import pyarrow as pa

    types = _plain(_open(file).schema_arrow)
    renamed = columns.renamed.items()
    arrays = {name: pa.nulls(0, types.field(column).type) for column, name in renamed}
    arrays = row_arrays(arrays, file.parent)
    return pa.schema([(name, values.type) for name, values in arrays.items()])


def _batches(file: Path, columns: TableColumns, schema: "pa.Schema") -> Iterator["pa.RecordBatch"]:
    import pyarrow as pa

    renamed = columns.renamed
    for batch in _read(file, list(renamed)):
        with _reading(file):
            arrays = dict(zip(batch.schema.names, map(_values, batch.columns), strict=True))
            arrays = {name: arrays[column] for column, name in renamed.items()}
            arrays = row_arrays(arrays, file.parent)
            cast = [arrays[field.name].cast(field.type) for field in schema]
            made = pa.RecordBatch.from_arrays(cast, schema=schema)
        yield made


def _read(file: Path, columns: list[str]) -> Iterator["pa.RecordBatch"]:
    with _reading(file):
        yield from _open(file).iter_batches(BATCH, columns=columns)


def _values(array: "pa.Array") -> "pa.Array":
    """Categories of other libraries as what they stand for."""
    import pyarrow as pa

    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def row_arrays(arrays: Mapping[str, "pa.Array"], folder: Path) -> dict[str, "pa.Array"]:
    """The columns of a file, by their names in `RawRows`, as rows have them."""
    import pyarrow as pa

    row_arrays = {**arrays}
    faults: Reasons | None = None
    parts = {name: row_arrays.pop(name) for name in chats.PARTS if name in arrays}
    if parts:
        row_arrays["messages"], faults = chats.of_arrays(parts)
    for name, field in [(name, field_of(name)) for name in arrays if name not in parts]:
        if field is None:
            continue
        row_arrays[name], reasons = field.of_array(arrays[name], folder)
        if reasons is not None:
            faults = reasons if faults is None else [*map(worse, faults, reasons)]
    if faults is not None:
        row_arrays["fault"] = pa.array(faults, pa.string())
    return row_arrays


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns errors of pyarrow in the block, which reads a file, into a DataError."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise_lack(error)
        raise DataError(f"{path} cannot be read ({reason_of(error)}); write it again.") from None
