"""The first rows of a table, by which its columns are detected."""

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from razorctl.data.own.fields import file_at
from razorctl.data.own.labels import COMMA, MARKED, as_list, begins_list

IMAGES = frozenset(
    {"image", "images", "img", "file", "file_name", "filename", "path", "filepath", "file_path"}
    | {f"{what}_{of}" for what in ("image", "img") for of in ("path", "file", "name")}
)
SUFFIXES = frozenset(
    f".{ending}"
    for ending in (
        *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "avif", "bmp", "gif", "tif", "tiff", "tga"),
        *("ppm", "pgm", "pbm", "pnm", "jp2"),
    )
)
CLASSES = 100  # a column of more values is taken as classes only where no other may be
SPAN = re.compile(r"[\[(]\d+,\s*\d+,\s*(['\"])\w+\1[\])]")  # as Python writes one
SAMPLE = 1000  # rows that columns are detected from
LOOKED_UP = 50  # values of a column that are looked up as files


@dataclass(frozen=True)
class Sample:
    """The first rows of a table: column -> values, and the columns whose type says what they are.

    images: columns of images, whose values may be left out. classes: columns of numbered classes.
    root: the folder that paths of images are relative to, None if they are no files.
    """

    values: Mapping[str, Sequence[Any]]
    images: frozenset[str] = frozenset()
    classes: frozenset[str] = frozenset()
    root: Path | None = None

    def present(self, column: str) -> list[Any]:
        """The values of a column that are not empty."""
        return [value for value in self.values[column] if value not in (None, "")]

    @property
    def numbered(self) -> dict[str, list[list[str]]]:
        """The columns of a CoNLL file, which have numbers and no names; none of other tables."""
        alike = all(name.isdigit() and self.has_lists(name, str) for name in self.values)
        return {name: self.present(name) for name in self.values} if alike else {}

    def texts(self, column: str) -> list[str]:
        """The values of a column of text that are not empty; none if most have another type."""
        values = self.present(column)
        texts = [value for value in values if isinstance(value, str)]
        return texts if 2 * len(texts) > len(values) else []

    def varied(self, *names: str) -> bool:
        """Whether most texts of each column are there once, so that they are no classes."""
        columns = [self.texts(name) for name in names]
        return bool(columns) and all(
            len(texts) > 2 and 2 * len(set(texts)) > len(texts) for texts in columns
        )

    def has_decimals(self, column: str) -> bool:
        """Whether half of the values of a column or more are numbers, one of them no whole one.

        Numbers with commas or signs count, so that they are refused where they are read.
        """
        return not all(map(float.is_integer, self.numbers(column)))

    def numbers(self, column: str) -> list[float]:
        """The numbers in a column; none if they are fewer than half of its values."""
        values = self.present(column)
        numbers = [number for number in map(_number, values) if number is not None]
        return numbers if 2 * len(numbers) >= len(values) else []

    def has_few_values(self, column: str, most: int = CLASSES) -> bool:
        """Whether the values of a column may be classes: texts or whole numbers, each repeated.

        most: more values than that are none.
        """
        values = [value for value in self.present(column) if value == value]  # NaN is none
        kinds = all(
            type(value) in (str, int, bool) or (type(value) is float and value.is_integer())
            for value in values
        )
        return kinds and 2 <= len(set(values)) <= min(most, len(values) // 2)

    def has_lists(self, column: str, kind: type = object) -> bool:
        """Whether most values of a column are lists, of which most have values of a kind alone.

        Malformed lists count, if there are others, so that they are refused where they are read.
        """
        values = self.present(column)
        begun = [value for value in values if begins_list(value)]
        lists = [part for part in map(as_list, begun) if part is not None]
        filled = [part for part in lists if part]
        alike = [part for part in filled if all(isinstance(value, kind) for value in part)]
        most = 2 * len(begun) > len(values) and 2 * len(alike) >= len(filled)
        return bool(lists) and most

    def has_spans(self, column: str) -> bool:
        """Whether a value of a column has parts of a text by their first and last characters."""
        return any(_is_span(as_list(value) or value) for value in self.values[column])

    def has_flags(self, column: str) -> bool:
        """Whether a column is of 0 and 1, or of true and false."""
        values = {str(value).casefold() for value in self.present(column)}
        return bool(values) and (values <= {"0", "1", "0.0", "1.0"} or values <= {"true", "false"})

    def has_images(self, column: str, names: Collection[str] = IMAGES) -> bool:
        """Whether a column has images, or most of its values are paths of images.

        names: the names of columns whose images may all be missing.
        """
        paths = self.texts(column)[:LOOKED_UP]
        if column in self.images or self.root is None or not paths:
            return column in self.images
        endings = [Path(path).suffix.casefold() in SUFFIXES for path in paths]
        if normalized_name(column) in names and all(endings):
            return True
        files = [
            is_image and os.path.isfile(file_at(self.root, path))  # noqa: PTH113
            for is_image, path in zip(endings, paths, strict=True)
        ]
        return 2 * sum(files) >= len(paths)

    def image_columns(self, taken: Collection[str] = ()) -> list[str]:
        """The columns of images that are not `taken`; if some have an image type, these alone."""
        free = [column for column in self.values if column not in taken]
        typed = [column for column in free if column in self.images]
        return typed or [column for column in free if self.has_images(column)]


def _is_span(value: Any) -> bool:
    """Whether a value is a span of a text as tools write it, or has one at any depth."""
    if isinstance(value, Mapping):
        named = all(any(str(key).startswith(end) for key in value) for end in ("start", "end"))
        return named or any(map(_is_span, value.values()))
    if isinstance(value, str):
        return value.lstrip()[:1] in ("[", "{", "(") and SPAN.search(value) is not None
    parts = value if isinstance(value, list) else []
    kinds = sorted(type(part).__name__ for part in parts)
    return kinds == ["int", "int", "str"] or any(map(_is_span, parts))


def _number(value: Any) -> float | None:
    """The finite number that a value is, or that a text stands for; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and COMMA.fullmatch(value):
        value = value.replace(",", ".")
    elif isinstance(value, str) and MARKED.fullmatch(value):
        value = re.sub(r"[^\d.+-]", "", value)
    with suppress(ValueError, OverflowError):
        number = float(value)
        return number if math.isfinite(number) else None
    return None


def normalized_name(column: str) -> str:
    """The name of a column as the sets of names here have it."""
    return column.strip().casefold().replace("-", "_").replace(" ", "_")
