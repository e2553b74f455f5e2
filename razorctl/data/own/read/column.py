"""The columns of the first rows of a table, by which their roles are detected."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from razorctl.data.own.fields import file_at
from razorctl.data.own.labels import COMMA, MARKED, as_list, begins_list

IMAGES = frozenset(
    {"image", "images", "img", "file", "file_name", "filename", "path", "filepath", "file_path"}
    | {f"{what}_{of}" for what in ("image", "img") for of in ("path", "file", "name")}
)
ENDINGS = "jpg jpeg jpe jfif png webp avif bmp gif tif tiff tga ppm pgm pbm pnm jp2"
SUFFIXES = frozenset(f".{ending}" for ending in ENDINGS.split())
CLASSES = 100  # a column of more values is the label only if no other column can be
SPAN = re.compile(r"[\[(]\d+,\s*\d+,\s*(['\"])\w+\1[\])]")  # a list in Python's notation
SAMPLE = 1000  # rows that columns are detected from
LOOKED_UP = 50  # values of a column that are looked up as files


@dataclass(frozen=True, eq=False)
class Column:
    """A column of the first rows of a table.

    name: in the table. values: one for each row, None where a row has none; empty for a column that
    holds images. holds: "images" or "classes" (numbers of named classes) by the type of the column
    in its file, else "". root: the folder that paths are relative to; None if values are no paths.
    alias: the name by which it is read; None for its own.
    """

    name: str
    values: Sequence[Any]
    holds: str = ""
    root: Path | None = None
    alias: str | None = None

    @cached_property
    def key(self) -> str:
        """The name in the form that sets of names have here: `Image-Path ` is image_path."""
        return normalized(self.name if self.alias is None else self.alias)

    @cached_property
    def present(self) -> list[Any]:
        """The values that are not empty."""
        return [value for value in self.values if value not in (None, "")]

    @cached_property
    def texts(self) -> list[str]:
        """The texts among the present values; none if most of these have another type."""
        texts = [value for value in self.present if isinstance(value, str)]
        return texts if 2 * len(texts) > len(self.present) else []

    @property
    def varied(self) -> bool:
        """Whether most texts are there once, so that they are no classes."""
        return len(self.texts) > 2 and 2 * len(set(self.texts)) > len(self.texts)

    @property
    def is_prose(self) -> bool:
        """Whether half of the texts or more have several words."""
        spaced = sum(" " in text.strip() for text in self.texts)
        return bool(self.texts) and 2 * spaced >= len(self.texts)

    @cached_property
    def numbers(self) -> list[float]:
        """The numbers among the present values; none if they are fewer than half of these.

        Numbers with commas or signs count, so that they are refused where they are read.
        """
        numbers = [number for number in map(_number, self.present) if number is not None]
        return numbers if 2 * len(numbers) >= len(self.present) else []

    @property
    def has_decimals(self) -> bool:
        """Whether values are numbers, and one of them is not whole."""
        return not all(map(float.is_integer, self.numbers))

    def may_be_classes(self, most: int = CLASSES) -> bool:
        """Whether the values are texts or whole numbers, at most `most`, each about twice."""
        values = [value for value in self.present if value == value]  # NaN is none
        kinds = all(
            type(value) in (str, int, bool) or (type(value) is float and value.is_integer())
            for value in values
        )
        return kinds and 2 <= len(set(values)) <= min(most, len(values) // 2)

    def has_lists(self, kind: type = object) -> bool:
        """Whether most values are lists, of which most have values of a kind alone.

        Malformed lists count, if there are others, so that they are refused where they are read.
        """
        begun = [value for value in self.present if begins_list(value)]
        lists = [items for items in map(as_list, begun) if items is not None]
        filled = [items for items in lists if items]
        alike = [items for items in filled if all(isinstance(item, kind) for item in items)]
        most = 2 * len(begun) > len(self.present) and 2 * len(alike) >= len(filled)
        return bool(lists) and most

    @property
    def has_spans(self) -> bool:
        """Whether a value has parts of a text by their first and last characters."""
        return any(_is_span(as_list(value) or value) for value in self.values)

    @property
    def has_flags(self) -> bool:
        """Whether the values are 0 and 1, or true and false."""
        values = {str(value).casefold() for value in self.present}
        return bool(values) and (values <= {"0", "1", "0.0", "1.0"} or values <= {"true", "false"})

    def has_images(self, named: bool | None = None) -> bool:
        """Whether values are images, or most of them are paths of images.

        named: whether the name is one of images; then all files may be missing. None looks the name
        up in IMAGES.
        """
        paths = self.texts[:LOOKED_UP]
        if self.holds == "images" or self.root is None or not paths:
            return self.holds == "images"
        endings = [Path(path).suffix.casefold() in SUFFIXES for path in paths]
        if all(endings) and (self.key in IMAGES if named is None else named):
            return True
        files = [
            is_image and os.path.isfile(file_at(self.root, path))  # noqa: PTH113
            for is_image, path in zip(endings, paths, strict=True)
        ]
        return 2 * sum(files) >= len(paths)


Columns = Mapping[str, Column]  # by their names in the table, in order


def columns_of(
    values: Mapping[str, Sequence[Any]], holds: Mapping[str, str], root: Path | None = None
) -> Columns:
    """The columns with these values; holds, root: as in `Column`."""
    return {name: Column(name, of, holds.get(name, ""), root) for name, of in values.items()}


def _is_span(value: Any) -> bool:
    """Whether a value is a span such as [0, 5, "PER"], or contains one at any depth."""
    if isinstance(value, Mapping):
        named = all(any(str(key).startswith(end) for key in value) for end in ("start", "end"))
        return named or any(map(_is_span, value.values()))
    if isinstance(value, str):
        return value.lstrip()[:1] in ("[", "{", "(") and SPAN.search(value) is not None
    parts = value if isinstance(value, list) else []
    kinds = sorted(type(part).__name__ for part in parts)
    return kinds == ["int", "int", "str"] or any(map(_is_span, parts))


def _number(value: Any) -> float | None:
    """The finite number of a value or of a text such as "1,5 €"; None for others."""
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


def normalized(name: str) -> str:
    """A name in the case and with the signs of the sets of names in this package."""
    return name.strip().casefold().replace("-", "_").replace(" ", "_")
