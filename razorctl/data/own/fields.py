"""What the columns of rows hold: how their values are read, and what is wrong with them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.data.own import chats
from razorctl.data.own.raw import ADDRESS, NEVER_SKIPPED, OUTSIDE
from razorctl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


Reasons = list[str | None]  # what is wrong with each value


@dataclass(frozen=True)
class Field:
    """A column of `Raw` without labels, here one of texts. name: as `Raw` calls it."""

    name: str

    def kind(self) -> "pa.DataType":
        """The type of values that are read from lines."""
        import pyarrow as pa

        return pa.string()

    def read(self, value: Any, column: str, folder: Path) -> tuple[Any, str | None]:
        """The value of a line as rows have it, and what is wrong with it.

        column: what the file calls it. folder: that of the file.
        """
        if value is None or isinstance(value, str):
            return value, None
        return None, f"{column} is no text"

    def stored(self, values: "pa.Array", folder: Path) -> tuple["pa.Array", Reasons | None]:
        """Typed values as rows have them, and what is wrong with each, None if nothing can be."""
        return values, None

    def faults(self, values: "pa.ChunkedArray", answered: bool) -> Mapping[int, str]:
        """The rows whose values cannot be used, and why; answered: as of `chats.faults`."""
        import pyarrow.compute as pc

        if not _is_text(values.type):
            raise DataError(
                f"a text column has values of type {values.type}; choose another with "
                "--text-column."
            )
        written = pc.fill_null(pc.match_substring_regex(values, r"\S"), False)
        blank = pc.indices_nonzero(pc.invert(written))
        return dict.fromkeys(blank.to_pylist(), "empty text")


class Picture(Field):
    """A column of images or of masks, which may be named by paths."""

    def read(self, value: Any, column: str, folder: Path) -> tuple[Any, str | None]:
        path, fault = super().read(value, column, folder)
        return (path, fault) if fault else self._at(path, folder)

    def _at(self, value: str | None, folder: Path) -> tuple[str, str | None]:
        value = (value or "").strip()
        path, fault = Path(value), None
        if not value:
            fault = f"no {self.name} path"
        elif "://" in value:
            fault = ADDRESS
        elif path.is_absolute() or ".." in path.parts:
            fault = OUTSIDE
        # Absolute, since the rows may be kept and used from another directory.
        return str(folder.absolute() / path), fault

    def stored(self, values: "pa.Array", folder: Path) -> tuple["pa.Array", Reasons | None]:
        import pyarrow as pa

        if not _is_text(values.type):
            return values, None
        found = [self._at(value, folder) for value in values.to_pylist()]
        return pa.array([path for path, _ in found], pa.string()), [fault for _, fault in found]

    def faults(self, values: "pa.ChunkedArray", answered: bool) -> Mapping[int, str]:
        """None: `images` opens them."""
        return {}


class Messages(Field):
    """A column of conversations."""

    def kind(self) -> "pa.DataType":
        return chats.kind()

    def read(self, value: Any, column: str, folder: Path) -> tuple[Any, str | None]:
        return chats.written(value)

    def stored(self, values: "pa.Array", folder: Path) -> tuple["pa.Array", Reasons | None]:
        return chats.standard(values), None

    def faults(self, values: "pa.ChunkedArray", answered: bool) -> Mapping[int, str]:
        return chats.faults(values, answered)


FIELDS = {
    field.name: field
    for field in (
        *(Picture("image"), Picture("mask")),
        *(Field("text"), Field("text_pair")),
        Messages("messages"),
    )
}


def worse(one: str | None, other: str | None) -> str | None:
    """The fault of a row with two: one that is never left out, or else the first."""
    return other if other in NEVER_SKIPPED else one or other


def _is_text(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
