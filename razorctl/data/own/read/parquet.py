"""Rows of Parquet files, and of Arrow files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.data.own import chats, objects
from razorctl.data.own.fields import field_of, worse
from razorctl.data.own.raw import Reasons
from razorctl.data.own.read.column import SAMPLE, Columns, columns_of
from razorctl.data.own.read.table_columns import TableColumns
from razorctl.errors import DataError, raise_lack, reason_of

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Features

BATCH = 100  # rows; a column of lists in a batch has 2 GB of text at most


class Arrow:
    """An Arrow file of `datasets`, with the interface of a Parquet file."""

    def __init__(self, file: Path) -> None:
        from datasets import Dataset

        self._table = Dataset.from_file(str(file)).data.table
        self.schema_arrow = self._table.schema

    def iter_batches(self, size: int, columns: list[str]) -> Iterator["pa.RecordBatch"]:
        yield from self._table.select(columns).to_batches(size)


@dataclass(frozen=True)
class TypedFile:
    """A Parquet file, or an Arrow file of `datasets`."""

    path: Path

    def _open(self) -> Any:
        from pyarrow.parquet import ParquetFile

        with self._reading():
            arrow = self.path.suffix == ".arrow"
            return Arrow(self.path) if arrow else ParquetFile(self.path, memory_map=True)

    @cached_property
    def features(self) -> "Features":
        """The columns and their types, as `datasets` marks them if it wrote the file."""
        from datasets import Features

        schema = self._open().schema_arrow
        if twice := [name for name in schema.names if schema.names.count(name) > 1]:
            raise DataError(f"{self.path} has two columns named {twice[0]}; rename one.")
        return Features.from_arrow_schema(_plain(schema))

    @cached_property
    def columns(self) -> Columns:
        """The columns of the first rows; raises DataError if the file cannot be read."""
        import pyarrow as pa

        def first(names: list[str]) -> Mapping[str, list[Any]]:
            batches = [*islice(self._read(names), SAMPLE // BATCH)]
            return pa.Table.from_batches(batches).to_pydict() if batches else {}

        return typed_columns(self.features, first, self.path.parent)

    @property
    def names(self) -> list[str]:
        """The names of all columns."""
        return list(self.features)

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """All rows; of an image it is the path alone, if it has one."""
        images = types_of(self.features)
        for batch in self._read(self.names):
            for row in batch.to_pylist():
                for name in (name for name in row if images[name] == "images"):
                    row[name] = row[name].get("path") if isinstance(row[name], dict) else None
                yield {name: _json_value(value) for name, value in row.items()}

    def class_names(self, label: str | None) -> tuple[str, ...] | None:
        """The names of the classes that the label's type has; None without them or a label."""
        return None if label is None else named_classes(self.features[label])

    def schema(self, columns: TableColumns) -> "pa.Schema":
        """The columns of `RawRows`, with a `fault` if images are named by paths."""
        import pyarrow as pa

        types = _plain(self._open().schema_arrow)
        none = {role: pa.nulls(0, types.field(name).type) for name, role in columns.renamed.items()}
        arrays = row_arrays(none, self.path.parent)
        return pa.schema([(name, values.type) for name, values in arrays.items()])

    def batches(self, columns: TableColumns, schema: "pa.Schema") -> Iterator["pa.RecordBatch"]:
        """The rows as `RawRows` has them; image paths are relative to the folder of the file."""
        import pyarrow as pa

        for batch in self._read(list(columns.renamed)):
            with self._reading():
                values = dict(zip(batch.schema.names, map(_values, batch.columns), strict=True))
                arrays = {role: values[name] for name, role in columns.renamed.items()}
                arrays = row_arrays(arrays, self.path.parent)
                cast = [arrays[field.name].cast(field.type) for field in schema]
                rows = pa.RecordBatch.from_arrays(cast, schema=schema)
            yield rows

    def _read(self, names: list[str]) -> Iterator["pa.RecordBatch"]:
        with self._reading():
            yield from self._open().iter_batches(BATCH, columns=names)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns errors of pyarrow in the block, which reads the file, into a DataError."""
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise_lack(error)
            reason = reason_of(error)
            raise DataError(f"{self.path} cannot be read ({reason}); write it again.") from None


def typed_columns(
    features: "Features",
    first: Callable[[list[str]], Mapping[str, Sequence[Any]]],
    root: Path | None = None,
) -> Columns:
    """The columns of data with these types, without the values of images.

    first: returns the first values of columns by their names. root: as in `Column`.
    """
    types = types_of(features)
    plain = [name for name in features if types.get(name) != "images"]
    values = first(plain) if plain else {}
    return columns_of({name: values.get(name, []) for name in features}, types, root)


def types_of(features: "Features") -> dict[str, str]:
    """The `Column.holds` of the columns of images and of numbered classes."""
    from datasets import ClassLabel, Image, Value

    def type_of(kind: Any) -> str:
        if isinstance(kind, dict):  # what `datasets` has not written is not marked as an image
            return "images" if {"bytes", "path"} == set(kind) else ""
        binary = isinstance(kind, Value) and kind.dtype in ("binary", "large_binary")
        image = binary or isinstance(kind, Image)
        return "images" if image else "classes" if isinstance(kind, ClassLabel) else ""

    return {name: type_of(kind) for name, kind in features.items()}


def _json_value(value: Any) -> Any:
    """A value as JSON may have it; dates, for example, become text."""
    if isinstance(value, Mapping):
        return {str(name): _json_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [*map(_json_value, value)]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)


def named_classes(kind: Any) -> tuple[str, ...] | None:
    """The class names in a type of `datasets`, or of its lists' items or objects; else None."""
    each = kind[0] if isinstance(kind, list) else getattr(kind, "feature", kind)
    if isinstance(each, dict):  # of objects
        return named_classes(objects.part(each, objects.CLASS))
    names = getattr(each, "names", None)
    return None if names is None else tuple(names)


def _plain(schema: "pa.Schema") -> "pa.Schema":
    """The schema with the values' types in place of dictionary types (categories of pandas)."""
    import pyarrow as pa

    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field
        for field in schema
    ]
    return pa.schema(fields, schema.metadata)


def _values(array: "pa.Array") -> "pa.Array":
    """The array with its values in place of a dictionary (categories of pandas)."""
    import pyarrow as pa

    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def row_arrays(arrays: Mapping[str, "pa.Array"], folder: Path) -> dict[str, "pa.Array"]:
    """The columns of rows from columns of a file, both by their names in `RawRows`."""
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
