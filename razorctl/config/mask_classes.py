"""Classes of masks: the notation of `Job.mask_values` and `Job.mask_colors`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from razorctl.errors import UsageError

IGNORED = 255  # the value of a pixel without a class, unless it is declared as a class
IGNORE = "ignore"  # the name of values without a class
COLOR = re.compile(r"\s*#?([0-9a-fA-F]{6})\s*(?:=(.*))?")
VALUE = re.compile(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*(?:=(.*))?")
MOST = 1000  # classes of masks; more values are probably numbers of objects


@dataclass(frozen=True)
class MaskClasses:
    """The pixel values of masks that stand for classes, and the values without a class.

    Args:
        numbers: value of a pixel, or color 0xRRGGBB -> number of its class; None is no class.
        names: the names of the classes; the default name is the value.
        colors: whether colors stand for classes.
    """

    numbers: dict[int, int | None]
    names: tuple[str, ...]
    colors: bool = False

    @property
    def named(self) -> bool:
        """Whether any class has a name."""
        return {shown(value, self.colors) for value in self.numbers}.isdisjoint(self.names)

    def __str__(self) -> str:
        """A notation of the classes by numbers, such as `0=0,255=ignore` or `#ff0000=1`."""
        return ",".join(
            f"{shown(value, self.colors)}={IGNORE if number is None else number}"
            for value, number in self.numbers.items()
        )


def shown(value: int, color: bool) -> str:
    """A value as text: a number, or #RRGGBB."""
    return f"#{value:06x}" if color else str(value)


def of_values(values: Sequence[int], names: Sequence[str] = ()) -> MaskClasses:
    """Classes with these values, named by `names` or by the values."""
    numbers: dict[int, int | None] = {value: number for number, value in enumerate(values)}
    numbers.setdefault(IGNORED, None)
    return MaskClasses(numbers, tuple(names) or tuple(map(str, values)))


@lru_cache(maxsize=16)
def parse(text: str, colors: bool | None = None) -> MaskClasses:
    """The classes of a notation: entries `0`, `1-3`, `7=car` or `255=ignore`, or `#ff0000=car`.

    Values with the same name are one class. Raises UsageError for other texts, and for fewer than
    two classes. colors: whether values are colors; None: whether the text begins with `#`.
    """
    colors = text.startswith("#") if colors is None else colors
    setting = "mask colors" if colors else "mask values"
    numbers: dict[int, int | None] = {}
    names: list[str] = []
    for entry in text.split(","):
        for value, label in _values(entry, setting, colors):
            name = label or shown(value, colors)
            if value in numbers:
                raise UsageError(f"{setting} have {shown(value, colors)} twice; give it once.")
            if name != IGNORE and name not in names:
                names.append(name)
            numbers[value] = None if name == IGNORE else names.index(name)
    if not 2 <= len(names) <= MOST:
        raise UsageError(
            f"{setting} {text!r} have {len(names):,} class{'es' * (len(names) != 1)}; give 2 to "
            f"{MOST:,}, such as {'#000000,#ff0000=car' if colors else '0,255=car'}."
        )
    if not colors:
        numbers.setdefault(IGNORED, None)
    return MaskClasses(numbers, tuple(names), colors)


def _values(entry: str, setting: str, colors: bool) -> list[tuple[int, str]]:
    """The values of an entry, each with its name, which may be empty."""
    if colors and (match := COLOR.fullmatch(entry)):
        return [(int(match[1], 16), (match[2] or "").strip())]
    if not colors and (match := VALUE.fullmatch(entry)):
        first, last = int(match[1]), int(match[2] or match[1])
        name = (match[3] or "").strip()
        if first <= last < first + MOST and (first == last or not name):
            return [(value, name) for value in range(first, last + 1)]
    example = "#000000,#ff0000=car" if colors else "0-2,7=car,255=ignore"
    raise UsageError(f"{setting} have {entry.strip()!r}; write them as {example}.")
