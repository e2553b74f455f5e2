"""The columns of rows: how their values are read from files, and what is wrong with them.

Each column is a `Field` of FIELDS.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.data.own import chats
from razorctl.data.own.labels import COMMA, MARKED, UNSAID, as_list, halved, is_missing
from razorctl.data.own.raw import ADDRESS, NEVER_SKIPPED, OUTSIDE, Reasons, is_text
from razorctl.errors import DataError
from razorctl.system.folders import exists

if TYPE_CHECKING:
    import pyarrow as pa


TRUTH = ("true", "false")


def file_at(folder: Path, path: str) -> Path:
    """The file at a path of a table in a folder, which may be written as Windows does."""
    file = folder / path
    return folder / path.replace("\\", "/") if "\\" in path and not exists(file) else file


@dataclass(frozen=True)
class Field:
    """A column of `RawRows` without labels, here one of texts. name: as `RawRows` calls it."""

    name: str

    def kind(self) -> "pa.DataType":
        """The type of values that are read from lines."""
        import pyarrow as pa

        return pa.string()

    def of_line(self, value: Any, column: str, folder: Path) -> tuple[Any, str | None]:
        """The value of a line as rows have it, and what is wrong with it.

        column: its name in the file. folder: the folder of the file.
        """
        if value is None or isinstance(value, str):
            return value, None
        return None, f"{column} is no text"

    def of_array(self, values: "pa.Array", folder: Path) -> tuple["pa.Array", Reasons | None]:
        """Typed values as rows have them, and what is wrong with each, None if nothing can be.

        folder: the folder of the file.
        """
        return values, None

    def of_each(self, values: "pa.Array", column: str, folder: Path) -> tuple["pa.Array", Reasons]:
        """The values as `of_line` reads them, and what is wrong with each."""
        import pyarrow as pa

        pairs = [self.of_line(value, column, folder) for value in values.to_pylist()]
        return pa.array([value for value, _ in pairs], self.kind()), [fault for _, fault in pairs]

    def faults(self, values: "pa.ChunkedArray", answered: bool = True) -> Mapping[int, str]:
        """The rows whose values cannot be used, and why. Raises DataError for another type.

        answered: whether a label is needed, or an answer in a conversation; if not, a
        conversation needs a question alone.
        """
        import pyarrow.compute as pc

        if not is_text(values.type):
            raise DataError(
                f"a text column has values of type {values.type}; choose another with "
                "--text-column."
            )
        blank = pc.indices_nonzero(pc.invert(_written(values)))
        return dict.fromkeys(blank.to_pylist(), "empty text")


class Picture(Field):
    """A column of images or of masks, which may be named by paths."""

    def of_line(self, value: Any, column: str, folder: Path) -> tuple[Any, str | None]:
        path, fault = super().of_line(value, column, folder)
        return (path, fault) if fault else self._at(path, folder)

    def of_array(self, values: "pa.Array", folder: Path) -> tuple["pa.Array", Reasons | None]:
        return self.of_each(values, self.name, folder) if is_text(values.type) else (values, None)

    def faults(self, values: "pa.ChunkedArray", answered: bool = True) -> Mapping[int, str]:
        """No rows: `images` opens the files."""
        return {}

    def _at(self, value: str | None, folder: Path) -> tuple[str, str | None]:
        """The absolute path of an image, and what is wrong with the one in the file."""
        value = (value or "").strip()
        path, fault = Path(value.replace("\\", "/")), None
        if not value:
            fault = f"no {self.name} path"
        elif "://" in value:
            fault = ADDRESS
        elif path.is_absolute() or ".." in path.parts:
            fault = OUTSIDE
        # Absolute, since the rows may be kept and used from another directory.
        return str(file_at(folder.absolute(), value)), fault


class Messages(Field):
    """A column of conversations, which are made of the parts that `chats` knows."""

    def kind(self) -> "pa.DataType":
        return chats.kind()

    def faults(self, values: "pa.ChunkedArray", answered: bool = True) -> Mapping[int, str]:
        return chats.faults(values, answered)


class Number(Field):
    """A column of numbers, fp64, which texts may stand for; null is none."""

    def kind(self) -> "pa.DataType":
        import pyarrow as pa

        return pa.float64()

    def of_line(self, value: Any, column: str, folder: Path) -> tuple[Any, str | None]:
        if is_missing(value) or value in UNSAID:
            return None, None
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            with suppress(ValueError, OverflowError):
                return float(value), None
        if isinstance(value, str) and COMMA.fullmatch(value):
            points = "numbers have a point, and several labels are a list"
            return None, f"the {column} {value!r} has a comma: {points}"
        if isinstance(value, str) and MARKED.fullmatch(value):
            return None, f"the {column} {value!r} has a sign or a comma: write digits and a point"
        return None, f"the {column} {value!r} is no number"

    def of_array(self, values: "pa.Array", folder: Path) -> tuple["pa.Array", Reasons | None]:
        import pyarrow as pa

        kind = values.type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            return values.cast(pa.float64()), None
        return self.of_each(values, "label", folder)

    def faults(self, values: "pa.ChunkedArray", answered: bool = True) -> Mapping[int, str]:
        import pyarrow.compute as pc

        odd = pc.indices_nonzero(pc.invert(pc.fill_null(pc.is_finite(values), False))).to_pylist()
        found = ((row, values[row].as_py()) for row in odd)
        return {
            row: "no label" if is_missing(v) else f"the label {v} is not finite" for row, v in found
        }


class Flag(Number):
    """A column of a label that a row has (1) or has not (0)."""

    def of_line(self, value: Any, column: str, folder: Path) -> tuple[Any, str | None]:
        if isinstance(value, bool) or (isinstance(value, str) and value.casefold() in TRUTH):
            return float(str(value).casefold() == "true"), None
        number, fault = super().of_line(value, column, folder)
        if fault is not None or number not in (None, 0, 1):
            return None, f"the {column} {value!r} is not 0 or 1"
        return number, None

    def of_array(self, values: "pa.Array", folder: Path) -> tuple["pa.Array", Reasons | None]:
        return self.of_each(values, "label", folder)


@dataclass(frozen=True)
class Several(Field):
    """A column of lists of labels: names, numbers of classes, or a 0 or 1 for each class.

    They are kept as texts; null is no list, and a row may have an empty one.
    each: the word for one.
    """

    each: str = "label"

    def kind(self) -> "pa.DataType":
        import pyarrow as pa

        return pa.list_(pa.string())

    def of_line(self, value: Any, column: str, folder: Path) -> tuple[Any, str | None]:
        if value is None:
            return None, None
        given = as_list(value)
        if given is None:
            return None, f"the {column} {value!r} is no list"
        if isinstance(value, str) and (fault := halved(given)):
            return None, fault
        labels: list[str | None] = []
        for label in given:
            if self.name == "tags" and is_missing(label):
                labels.append(None)
                continue
            if isinstance(label, float) and label.is_integer():
                label = int(label)
            if isinstance(label, float):
                return None, f"a {self.each} of {label}, which is no name and no whole number"
            if not isinstance(label, (str, int)) or (isinstance(label, str) and not label.strip()):
                return None, f"a {self.each} of {label!r}, which is no name"
            labels.append(str(int(label)) if isinstance(label, bool) else str(label).strip())
        return labels, None

    def of_array(self, values: "pa.Array", folder: Path) -> tuple["pa.Array", Reasons | None]:
        return self.of_each(values, self.name, folder)

    def faults(self, values: "pa.ChunkedArray", answered: bool = True) -> Mapping[int, str]:
        import pyarrow.compute as pc

        return dict.fromkeys(pc.indices_nonzero(values.is_null()).to_pylist(), f"no {self.each}s")


class Words(Several):
    """A column of lists of tokens."""

    def faults(self, values: "pa.ChunkedArray", answered: bool = True) -> Mapping[int, str]:
        import pyarrow.compute as pc

        counts = pc.fill_null(pc.list_value_length(values), 0)
        return dict.fromkeys(pc.indices_nonzero(pc.equal(counts, 0)).to_pylist(), "no tokens")


FIELDS = {
    field.name: field
    for field in (
        *(Picture("image"), Picture("mask")),
        *(Field("text"), Field("text_pair")),
        Messages("messages"),
        *(Number("number"), Several("labels"), Flag("flag")),
        *(Words("tokens", "token"), Several("tags", "tag")),
    )
}


def field_of(name: str) -> Field | None:
    """The field of a column of `RawRows`, of which there may be several, as flag.0 and flag.1."""
    return FIELDS.get(name.partition(".")[0])


def worse(one: str | None, other: str | None) -> str | None:
    """The fault of a row with two: one that is never left out, or else the first."""
    return other if other in NEVER_SKIPPED else one or other


def _written(texts: Any) -> Any:
    """Whether each text has more than white space."""
    import pyarrow.compute as pc

    return pc.fill_null(pc.match_substring_regex(texts, r"\S"), False)
