"""The columns of rows, each a `Field` of FIELDS: reads its values from files and finds faults."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.data.own import chats, objects
from razorctl.data.own.labels import COMMA, MARKED, UNSAID, as_list, halved, is_missing
from razorctl.data.own.raw import ADDRESS, NEVER_SKIPPED, OUTSIDE, Reasons, is_text
from razorctl.errors import DataError
from razorctl.system.folders import exists

if TYPE_CHECKING:
    import pyarrow as pa


TRUTH = ("true", "false")


def file_at(folder: Path, path: str) -> Path:
    """The file at a relative path, also with the separators of Windows."""
    file = folder / path
    return folder / path.replace("\\", "/") if "\\" in path and not exists(file) else file


@dataclass(frozen=True)
class Field:
    """A column of `RawRows` without labels, here one of texts. name: as `RawRows` calls it."""

    name: str

    def kind(self) -> "pa.DataType":
        """The Arrow type of values that are read from lines."""
        import pyarrow as pa

        return pa.string()

    def of_line(self, value: Any, column: str, folder: Path) -> tuple[Any, str | None]:
        """The value of a row from the value of a line, and its fault, or None.

        column: its name in the file. folder: the folder of the file.
        """
        if value is None or isinstance(value, str):
            return value, None
        return None, f"{column} is not text"

    def of_array(self, values: "pa.Array", folder: Path) -> tuple["pa.Array", Reasons | None]:
        """The values of rows from typed values, and the fault of each; None if there are no faults.

        folder: the folder of the file.
        """
        return values, None

    def of_each(self, values: "pa.Array", column: str, folder: Path) -> tuple["pa.Array", Reasons]:
        """The values of rows by `of_line`, and the fault of each."""
        import pyarrow as pa

        pairs = [self.of_line(value, column, folder) for value in values.to_pylist()]
        return pa.array([value for value, _ in pairs], self.kind()), [fault for _, fault in pairs]

    def faults(self, values: "pa.ChunkedArray", answered: bool = True) -> Mapping[int, str]:
        """Row -> the fault of its value, for values of rows. Raises DataError for another type.

        answered: whether a conversation needs an answer, and not only a question.
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
    """A column of images or of masks: bytes, or paths."""

    def of_line(self, value: Any, column: str, folder: Path) -> tuple[Any, str | None]:
        path, fault = super().of_line(value, column, folder)
        return (path, fault) if fault else self._at(path, folder)

    def of_array(self, values: "pa.Array", folder: Path) -> tuple["pa.Array", Reasons | None]:
        return self.of_each(values, self.name, folder) if is_text(values.type) else (values, None)

    def faults(self, values: "pa.ChunkedArray", answered: bool = True) -> Mapping[int, str]:
        """No faults: `images` finds them when it opens the files."""
        return {}

    def _at(self, value: str | None, folder: Path) -> tuple[str, str | None]:
        """The absolute path of an image, and the fault of its path in the file."""
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
    """A column of conversations; `chats` makes them of several columns."""

    def kind(self) -> "pa.DataType":
        return chats.kind()

    def faults(self, values: "pa.ChunkedArray", answered: bool = True) -> Mapping[int, str]:
        return chats.faults(values, answered)


class Number(Field):
    """A column of numbers, fp64, also from texts such as "0.5"; null is not a number."""

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
            points = "write numbers with a point, and several labels as a list"
            return None, f"the {column} {value!r} has a comma: {points}"
        if isinstance(value, str) and MARKED.fullmatch(value):
            return None, f"the {column} {value!r} has a sign or a comma: write digits and a point"
        return None, f"the {column} {value!r} is not a number"

    def of_array(self, values: "pa.Array", folder: Path) -> tuple["pa.Array", Reasons | None]:
        import pyarrow as pa

        kind = values.type
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            return values.cast(pa.float64()), None
        return self.of_each(values, "label", folder)

    def faults(self, values: "pa.ChunkedArray", answered: bool = True) -> Mapping[int, str]:
        import pyarrow.compute as pc

        odd = pc.indices_nonzero(pc.invert(pc.fill_null(pc.is_finite(values), False))).to_pylist()
        labels = {row: values[row].as_py() for row in odd}
        return {
            row: "no label" if is_missing(label) else f"the label {label} is not finite"
            for row, label in labels.items()
        }


class Flag(Number):
    """A column of 0 and 1: whether a row has a label."""

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

    Labels become texts. Null is no list; a row may have an empty list. each: the word for a label.
    """

    each: str = "label"

    def kind(self) -> "pa.DataType":
        import pyarrow as pa

        return pa.list_(pa.string())

    def of_line(self, value: Any, column: str, folder: Path) -> tuple[Any, str | None]:
        if value is None:
            return None, None
        items = as_list(value)
        if items is None:
            return None, f"the {column} {value!r} is not a list"
        if isinstance(value, str) and (fault := halved(items)):
            return None, fault
        labels: list[str | None] = []
        for label in items:
            if self.name == "tags" and is_missing(label):
                labels.append(None)
                continue
            if isinstance(label, float) and label.is_integer():
                label = int(label)
            if isinstance(label, float):
                return None, f"a {self.each} of {label}, which is neither a name nor a whole number"
            if not isinstance(label, (str, int)) or (isinstance(label, str) and not label.strip()):
                return None, f"a {self.each} of {label!r}, which is not a name"
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


class Objects(Field):
    """A column of boxes with a class each."""

    def kind(self) -> "pa.DataType":
        return objects.kind()

    def of_line(self, value: Any, column: str, folder: Path) -> tuple[Any, str | None]:
        return objects.of_value(value, column)

    def of_array(self, values: "pa.Array", folder: Path) -> tuple["pa.Array", Reasons | None]:
        return self.of_each(values, self.name, folder)

    def faults(self, values: "pa.ChunkedArray", answered: bool = True) -> Mapping[int, str]:
        """No faults: `boxes` finds them when the format is known."""
        return {}


_FIELDS = [Picture("image"), Picture("mask"), Field("text"), Field("text_pair"), Field("negative")]
_FIELDS += [Messages("messages"), Number("number"), Several("labels"), Flag("flag")]
_FIELDS += [Words("tokens", "token"), Several("tags", "tag"), Objects("objects")]
FIELDS = {field.name: field for field in _FIELDS}


def field_of(name: str) -> Field | None:
    """The field of a column of `RawRows`: of flag for flag.0 and flag.1; None for other columns."""
    return FIELDS.get(name.partition(".")[0])


def worse(one: str | None, other: str | None) -> str | None:
    """The one fault that counts of two: a fault in NEVER_SKIPPED, or else the first."""
    return other if other in NEVER_SKIPPED else one or other


def _written(texts: Any) -> Any:
    """Whether each text has more than white space."""
    import pyarrow.compute as pc

    return pc.fill_null(pc.match_substring_regex(texts, r"\S"), False)
