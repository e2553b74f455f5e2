"""Masks of images: their classes, and their faults."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from razorctl import units
from razorctl.config import mask_classes
from razorctl.config.mask_classes import IGNORED, MOST, MaskClasses
from razorctl.data.own import contents, images, rows
from razorctl.data.own.images import Findings
from razorctl.data.own.raw import NEVER_SKIPPED, SHOWN, Faults, RawRows, skip_or_refuse
from razorctl.data.own.request import DataRequest
from razorctl.errors import DataError
from razorctl.models import Progress, masks

BINARY = [0, IGNORED]  # values that are two classes where masks have no others
COLORED = (
    "of colors: save one channel whose values are classes, or give the colors with --mask-colors"
)
DEEP = "of one channel, whose values are not colors: give them with --mask-values"


def findings(raw: RawRows, faults: Faults, progress: Progress = lambda _: None) -> Findings:
    """For each mask its fault or "", its values as words, and its content.

    A word is `3`, `3#ff0000` with the color of a palette, `3#` for more than 8 bits, or `#ff0000`
    for a color. Rows with a fault are left out.
    """
    look = partial(_look, raw.root)
    masks_of = images.Inspector(raw, faults, ("image", "mask"), look, tuple[str, str, int])
    return masks_of.findings(progress)


def with_classes(raw: RawRows, request: DataRequest) -> RawRows:
    """The rows with their classes, from options, a file of names, or the training masks' values.

    Reads the masks only in the last case. Raises DataError if there are no classes.
    """
    classes, names = request.mask_classes, raw.class_names
    if classes is not None and names is not None and not classes.named:
        if len(names) != len(classes.names):
            raise DataError(
                f"{raw.name} has the names of {units.count(len(names), 'class')}, and values or "
                f"colors of masks for {len(classes.names):,}; give as many."
            )
        classes = replace(classes, names=names)
    if classes is not None:
        return replace(raw, class_names=classes.names, mask_classes=str(classes))
    return _by_values(raw) if names is None else raw


def _by_values(raw: RawRows) -> RawRows:
    """The rows with a class for each value of the training masks."""
    bad = rows.faults(raw)
    looked = findings(raw, bad)
    faults = mask_faults(raw, looked)
    values = sorted(_values(looked["train"], faults["train"]))
    if not values:
        every = {split: {**bad[split], **faults[split]} for split in bad}
        skip_or_refuse(raw.name, [*raw.with_places(every)], skip_bad=False)
    classes = values if values == BINARY else [value for value in values if value != IGNORED]
    if len(classes) < 2 or classes[-1] >= MOST:
        has = f"values up to {classes[-1]:,}" if len(classes) > 1 else "no class"
        has += f" but {classes[0]}" if len(classes) == 1 else ""
        raise DataError(
            f"the masks of {raw.name} have {has}, besides {IGNORED} for pixels to ignore; write "
            "the classes as 0, 1, 2 and so on, or name their values with --mask-values."
        )
    of = mask_classes.of_values(classes)
    if classes == [*range(len(classes))]:
        return replace(raw, class_names=of.names)
    few = ", ".join(of.names[:SHOWN]) + ", ..." * (len(classes) > SHOWN)
    note = f"the masks of {raw.name} have {len(classes):,} values, {few}: each is a class"
    note += f", and {IGNORED} is ignored" * (IGNORED in values and values != BINARY)
    notes = (*raw.notes, f"{note}; change that with --mask-values.")
    return replace(raw, class_names=of.names, mask_classes=str(of), notes=notes)


def mask_faults(raw: RawRows, looked: Findings) -> dict[str, dict[int, str]]:
    """Split -> row -> the fault of its mask, by the results of `findings`.

    raw: with the classes, if there are any by now. Raises DataError for palettes that differ, and
    if two classes have names and 0 and 255 are the only values.
    """
    if not raw.mask_classes:
        _check_palettes(raw, looked)
    of = mask_classes.parse(raw.mask_classes) if raw.mask_classes else None
    if of is None and raw.class_names is not None:
        of = mask_classes.of_values(range(len(raw.class_names)), raw.class_names)
        if len(of.names) == 2 and sorted(_values(looked["train"])) == BINARY:
            raise DataError(
                f"the masks of {raw.name} have only the values 0 and {IGNORED}, and {IGNORED} "
                f"marks ignored pixels; if it is a class, give --mask-values 0,{IGNORED}."
            )
    faults: dict[str, dict[int, str]] = {}
    for split, rows_of in looked.items():
        faults[split] = {}
        for row, (fault, words, _) in rows_of.items():
            if not fault and (class_fault := _class_fault(words.split(), of)):
                fault = f"mask: {class_fault}"
            if fault:
                faults[split][row] = fault
    return faults


def _class_fault(words: Sequence[str], of: MaskClasses | None) -> str | None:
    """The fault of the values of a mask; None if all are values of classes."""
    colors = of is not None and of.colors
    values = [_color(word) if colors else _value(word) for word in words]
    if None in values:
        return DEEP if colors else COLORED
    if of is None:
        return None
    shown = {value: mask_classes.shown(value, colors) for value in values if value is not None}
    if others := sorted(shown.keys() - of.numbers.keys()):
        what, count = "color" if colors else "value", units.count(len(of.names), "class")
        return f"the {what} {shown[others[-1]]}, which is none of {count}"
    if all(of.numbers[value] is None for value in shown):
        return f"no pixel of a class, only {', '.join([*shown.values()][:SHOWN])}"
    return None


def _values(looked: Mapping[int, tuple[str, str, int]], bad: Container[int] = ()) -> set[int]:
    """The values in the masks of rows that are not bad."""
    words = (of[1].split() for row, of in looked.items() if row not in bad)
    return {value for word in chain.from_iterable(words) if (value := _value(word)) is not None}


def _value(word: str) -> int | None:
    value = word.split("#")[0]
    return int(value) if value else None


def _color(word: str) -> int | None:
    value, color, digits = word.partition("#")
    if color:
        return int(digits, 16) if digits else None
    return int(value) * 0x010101


def _check_palettes(raw: RawRows, looked: Findings) -> None:
    """Raises DataError for a value with one color in a file and another color in another file."""
    first: dict[str, tuple[str, str]] = {}
    for split, rows_of in looked.items():
        for row, (_, words, _) in rows_of.items():
            for value, color, digits in (word.partition("#") for word in words.split()):
                if not (value and color and digits):
                    continue
                place, other = first.setdefault(value, (raw.place(split, row), digits))
                if digits != other:
                    raise DataError(
                        f"the masks of {place} and {raw.place(split, row)} have different "
                        f"palettes: {value} is #{other} in one and #{digits} in the other; give "
                        "the classes of colors with --mask-colors, or of values with --mask-values."
                    )


def _look(root: Path | None, image: Any, mask: Any) -> tuple[str, str, int]:
    words: list[str] = []

    def see(opened: Any, _: tuple[int, int]) -> str | None:
        if opened.format in ("JPEG", "MPO"):
            return "a JPEG, which changes values: save it as PNG"
        if opened.mode not in masks.MODES + masks.COLORS:
            return f"of mode {opened.mode}: save one channel whose values are classes, as PNG"
        size = images.size_of(root, image)
        if size not in (None, opened.size):
            sizes = (f"{width} x {height}" for width, height in (opened.size, size))
            return " pixels, and its image ".join(sizes)
        values = masks.occurring(opened)
        if values[0] < 0:
            return f"the value {values[0]}: write classes as 0, 1, 2 and so on"
        if len(values) > MOST:
            return f"more than {MOST:,} values, which are not classes"
        words.extend(_words(opened, values))
        return None

    if mask is None:
        return "no mask", "", 0
    fault = images.image_fault(root, mask, see, values=True)
    if fault is not None:
        return fault if fault in NEVER_SKIPPED else f"mask: {fault}", "", 0
    return "", " ".join(words), contents.image_content(mask)


def _words(opened: Any, values: Sequence[int]) -> list[str]:
    """The values of a mask as words: see `findings`."""
    if opened.mode in masks.COLORS:
        return [mask_classes.shown(value, True) for value in values]
    if opened.mode in ("P", "1"):
        palette = opened.getpalette() or [0, 0, 0, 255, 255, 255]
        colors = [bytes(palette[3 * value : 3 * value + 3]).hex() for value in values]
        return [f"{value}#{color:0>6}" for value, color in zip(values, colors, strict=True)]
    return [f"{value}{'' if opened.mode == 'L' else '#'}" for value in values]
