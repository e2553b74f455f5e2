"""Labels as numbers of classes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from razorctl.data.own.raw import Raw
from razorctl.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Numbers = Mapping[str, "np.ndarray[Any, Any]"]  # split -> the number of each row's class, or -1

WHOLE = re.compile(r"[+-]?\d+(\.0+)?")
SEVERAL = "razorctl has no task for several labels of a row (multi-label)"
NUMBERS = "razorctl has no task for numbers (regression), only for classes"
DECIMAL = re.compile(r"[+-]?\d*\.\d+")


@dataclass(frozen=True)
class Labels:
    """The classes, each with the label [classes] that stands for it in the data."""

    classes: tuple[str, ...]
    values: "pa.Array"

    @classmethod
    def indices(cls, classes: tuple[str, ...]) -> "Labels":
        """Those of labels that are numbers of classes already."""
        import pyarrow as pa

        return cls(classes, pa.array(range(len(classes)), pa.int64()))

    def numbers(self, labels: "pa.ChunkedArray") -> "np.ndarray[Any, Any]":
        """The number of the class of each label; -1 is none."""
        import pyarrow.compute as pc

        found = pc.index_in(_wide(labels), value_set=self.values)
        numbers: np.ndarray[Any, Any] = pc.fill_null(found, -1).to_numpy()
        return numbers.astype("int64")


def numbered(raw: Raw) -> tuple[tuple[str, ...], Numbers]:
    """The class names, and the number of each row's class; -1 is a row without a label.

    Of tasks without labels all numbers are 0. Raises what `of` raises.
    """
    import numpy as np

    if raw.task != "classification":
        zeros = {split: np.zeros(len(rows), np.int64) for split, rows in raw.splits.items()}
        return raw.class_names or (), zeros
    labels = of(raw)
    columns = {split: rows.data.column("label") for split, rows in raw.splits.items()}
    return labels.classes, {split: labels.numbers(column) for split, column in columns.items()}


def of(raw: Raw) -> Labels:
    """The classes of labels: those of their type, or all labels in the order of numbers or letters.

    Raises DataError if labels are not classes or not of one type.
    """
    import pyarrow as pa

    found = {split: _wide(rows.data.column("label")) for split, rows in raw.splits.items()}
    kinds = {column.type for column in found.values()}
    if len(kinds) > 1:
        raise DataError(
            f"labels of {raw.name} are of mixed type, {' and '.join(sorted(map(str, kinds)))}; "
            "give all splits one type."
        )
    kind = kinds.pop()
    if pa.types.is_nested(kind):
        raise DataError(
            f"labels of {raw.name} are no single values but {kind}, and {SEVERAL}; choose another "
            "column with --label-column."
        )
    values = {value for column in found.values() for value in column.unique().to_pylist()}
    if raw.class_names is None:
        known = _ordered(raw, {value for value in values if not missing(value)})
        classes = tuple(name_of(value) for value in known)
    else:
        classes = raw.class_names
        known = list(range(len(classes)))
    return Labels(classes, pa.array(known, kind))


def _wide(column: "pa.ChunkedArray") -> "pa.ChunkedArray":
    """Labels in half precision, which pyarrow cannot look up, in single."""
    import pyarrow as pa

    return column.cast(pa.float32()) if pa.types.is_float16(column.type) else column


def missing(value: Any) -> bool:
    """Whether a label is none."""
    # NaN is the only value that differs from itself.
    return value is None or value != value or (isinstance(value, str) and not value.strip())


def name_of(value: Any) -> str:
    """The name of the class that a label which is no number of a class stands for."""
    if isinstance(value, float):
        value = int(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _ordered(raw: Raw, values: set[Any]) -> list[Any]:
    """The values in order; raises DataError if they are not classes."""
    if odd := [value for value in values if type(value) not in (str, int, bool, float)]:
        raise DataError(
            f"labels of {raw.name} are no single values, such as {odd[0]!r}; choose another column "
            "with --label-column."
        )
    texts = [value for value in values if isinstance(value, str)]
    parts: list[Any] = [v for v in values if isinstance(v, float) and not v.is_integer()]
    if raw.untyped:
        whole = [text for text in texts if WHOLE.fullmatch(text)]
        parts = [text for text in texts if DECIMAL.fullmatch(text) and text not in whole]
        if whole and not parts and len(whole) < len(texts):
            other = min(set(texts) - set(whole))
            raise DataError(
                f"labels of {raw.name} are of mixed type, numbers such as {min(whole)} and text "
                f"such as {other!r}; give all of them one type."
            )
    if parts:
        raise DataError(
            f"labels of {raw.name} are decimal numbers, such as {min(parts)}, and {NUMBERS}; "
            "choose another column with --label-column."
        )
    if texts and all(map(WHOLE.fullmatch, texts)):
        return sorted(texts, key=lambda text: (float(text), text))
    return sorted(values)
