"""The columns of a table that a task uses: given, or detected."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from razorctl.data.own.ask import Ask
from razorctl.errors import UsageError
from razorctl.models import Modality
from razorctl.tasks import LANGUAGE, Task

LABELS = frozenset({"label", "labels", "class", "target", "category"})
IMAGES = frozenset(
    {"image", "images", "img", "file", "file_name", "filename", "path", "filepath", "file_path"}
    | {f"{what}_{of}" for what in ("image", "img") for of in ("path", "file", "name")}
)
MASKS = frozenset(
    {"mask", "masks", "annotation", "annotations", "segmentation", "label", "labels", "seg_map"}
    | {f"{what}_{of}" for what in ("mask", "annotation") for of in ("path", "file", "name")}
    | {"segmentation_mask", "semantic_mask", "label_image"}
)
MESSAGES = frozenset({"messages", "conversations", "conversation"})
TEXTS = frozenset({"text", "sentence", "review"})
PAIRS = (
    ("sentence1", "sentence2"),
    ("sentence_1", "sentence_2"),
    ("text1", "text2"),
    ("text", "text_pair"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
)
SUFFIXES = frozenset(
    f".{ending}"
    for ending in (
        *("jpg", "jpeg", "jpe", "jfif", "png", "webp", "avif", "bmp", "gif", "tif", "tiff", "tga"),
        *("ppm", "pgm", "pbm", "pnm", "jp2"),
    )
)
SAMPLE = 1000  # rows that columns are detected from
LOOKED_UP = 50  # values of a column that are looked up as files
CLASSES = 100  # more values than that are no classes, unless the column is called so


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


@dataclass(frozen=True)
class Columns:
    """The columns that a task uses: of an image, of one or two texts or of conversations.

    label: empty if labels are not read. mask: of an image, for segmentation.
    """

    label: str
    image: str | None = None
    texts: tuple[str, ...] = ()
    task: Task = "classification"
    mask: str | None = None
    messages: str | None = None

    @property
    def modality(self) -> Modality:
        return "text" if self.image is None else "image"

    @property
    def renamed(self) -> dict[str, str]:
        """Column -> its name in `Raw`."""
        single = {self.image: "image", self.mask: "mask", self.messages: "messages"}
        return {
            **{column: own for column, own in single.items() if column is not None},
            **dict(zip(self.texts, ("text", "text_pair"), strict=False)),
            **({self.label: "label"} if self.label else {}),
        }

    @property
    def told(self) -> str:
        """The columns, as the end of a sentence."""
        parts = {
            "image": self.image,
            "mask": self.mask,
            "text": " and ".join(self.texts),
            "conversations": self.messages,
            "label": self.label,
        }
        return ", ".join(f"{what} in {column}" for what, column in parts.items() if column)


def detect(ask: Ask, sample: Sample) -> Columns:
    """The columns of a table that a classifier uses.

    Raises UsageError, which lists the columns, for a given column that is not there, and if it is
    not clear which one to use.
    """
    image = _given(ask, sample, ask.image_column, "image")
    texts = _given_texts(ask, sample, ask.text_column)
    label = _given(ask, sample, ask.label_column, "label")
    taken = {column for column in (image, label, *texts) if column is not None}
    if image is None and not texts:
        image = _image(ask, sample, taken)
        texts = _texts(ask, sample, taken, image)
        if image is not None and texts:
            raise UsageError(
                f"{ask.name} has images in column {image} and text in {' and '.join(texts)}, of "
                f"{_listed(sample.values)}; choose with --image-column or --text-column."
            )
    if image is None and not texts:
        images, prose = "--image-column", "--text-column"
        raise UsageError(
            f"none of the columns of {ask.name} is clearly an image or a text: "
            f"{_listed(sample.values)}; name one with {images} or {prose}."
        )
    used = [column for column in (image, *texts) if column is not None]
    label = label or _label(ask, sample, used)
    if len({*used, label}) <= len(used):
        raise UsageError(
            f"column {label} of {ask.name} cannot be used twice; name others of "
            f"{_listed(sample.values)}."
        )
    return Columns(label, image, texts)


def text(ask: Ask, sample: Sample) -> str | None:
    """The column of texts that are used alone; None if there is none, or only pairs of texts.

    One called text is preferred. Raises UsageError for a given column that is not there, and if
    several may be it.
    """
    texts = _given_texts(ask, sample, ask.text_column)
    if not texts:
        called = [c for c in sample.values if plain(c) == "text" and text_values(sample, c)]
        texts = tuple(called) if len(called) == 1 else _texts(ask, sample, set(), None)
    return texts[0] if len(texts) == 1 else None


def conversations(sample: Sample) -> str | None:
    """The column of conversations: lists that are called so; None if there is none."""
    for column, values in sample.values.items():
        if plain(column) in MESSAGES and any(isinstance(value, list) for value in values):
            return column
    return None


def masked(ask: Ask, sample: Sample) -> tuple[str | None, str | None]:
    """The columns of images and of their masks, which `Job.label_column` names; None if not clear.

    Errors are those of `detect`.
    """
    image = _given(ask, sample, ask.image_column, "image")
    mask = _given(ask, sample, ask.label_column, "label")
    if mask is None:
        found = [
            column
            for column in sample.values
            if column != image and plain(column) in MASKS and of_images(sample, column, MASKS)
        ]
        mask = _one(ask, sample, found, "mask", "label-column")
    elif not of_images(sample, mask, {plain(mask)}):
        mask = None
    if image is None and mask is not None:
        image = _image(ask, sample, {mask})
    return image, mask


def labels(ask: Ask, sample: Sample, used: Sequence[str], *, named: bool = False) -> Sequence[str]:
    """The columns beside those in `used` that may be the label; more than one is not clear.

    named: whether only those count whose name or type says so, not those of few values.
    """
    if ask.label_column is not None:
        return [ask.label_column]

    def few(column: str) -> bool:
        values = [value for value in sample.values[column] if value not in (None, "")]
        if not values or any(type(value) not in (str, int, bool) for value in values):
            return False
        return 2 <= len(set(values)) <= min(CLASSES, len(values) // 2)

    free = [c for c in sample.values if c not in used and c not in sample.images]
    ways: tuple[Callable[[str], bool], ...] = (
        lambda column: plain(column) in LABELS,
        lambda column: column in sample.classes,
        lambda column: not named and few(column),
    )
    found = ([column for column in free if fits(column)] for fits in ways)
    return next(filter(None, found), [])


def as_trained(ask: Ask, sample: Sample) -> Ask:
    """What is asked, with the columns that the run was trained on, if the table has them.

    Those that are given stay; if that is one of images or of texts, neither is taken.
    """
    trained = ask.trained
    if trained is None:
        return ask
    label = ask.label_column
    if label is None and trained.label_column in sample.values:
        label = trained.label_column
    if ask.image_column is not None or ask.text_column is not None:
        return replace(ask, label_column=label)
    image, text = trained.image_column, trained.text_column
    there = text is not None and {*_parts(sample, text)} <= sample.values.keys()
    return replace(
        ask,
        image_column=image if image in sample.values else None,
        text_column=text if there else None,
        label_column=label,
    )


def unlabeled(ask: Ask, sample: Sample, modality: Modality) -> Columns:
    """The columns of a table whose labels are not read; the errors are of `detect`.

    modality: what the model takes. A language model takes one text, and a causal one conversations.
    """
    messages = conversations(sample) if ask.task == "causal-lm" else None
    if messages is not None and ask.text_column in (None, messages):
        return Columns("", messages=messages)
    image = _given(ask, sample, ask.image_column, "image")
    texts = _given_texts(ask, sample, ask.text_column)
    taken = {column for column in (ask.label_column,) if column is not None}
    if modality == "image":
        if image is None and ask.task == "segmentation":
            image, mask = masked(ask, sample)
            image = None if mask is None else image
        image = image or _image(ask, sample, taken)
    elif ask.task in LANGUAGE:
        single = text(ask, sample)
        texts = () if single is None else (single,)
    else:
        texts = texts or _texts(ask, sample, taken, None)
    if image is None and not texts:
        raise UsageError(
            f"none of the columns of {ask.name} clearly holds {modality}s: {_listed(sample.values)}"
            f"; name one with --{modality}-column."
        )
    return Columns("", image, texts)


def _listed(columns: Iterable[str]) -> str:
    return ", ".join(map(str, columns))


def _given(ask: Ask, sample: Sample, column: str | None, what: str) -> str | None:
    if column is not None and column not in sample.values:
        raise UsageError(
            f"{ask.name} has no column {column}, only {_listed(sample.values)}; name one of them "
            f"with --{what}-column."
        )
    return column


def _given_texts(ask: Ask, sample: Sample, given: str | None) -> tuple[str, ...]:
    if given is None:
        return ()
    parts = _parts(sample, given)
    if len(parts) > 2 or len(set(parts)) < len(parts):
        raise UsageError(f"text column {given!r} does not name one or two columns; give a or a,b.")
    for part in parts:
        _given(ask, sample, part, "text")
    return tuple(parts)


def _parts(sample: Sample, given: str) -> list[str]:
    # The name of a column may have a comma in it.
    return [given] if given in sample.values else [part.strip() for part in given.split(",")]


def plain(column: str) -> str:
    """The name of a column as the sets of names here have it."""
    return column.strip().casefold().replace("-", "_").replace(" ", "_")


def _one(ask: Ask, sample: Sample, found: Sequence[str], role: str, flag: str) -> str | None:
    """The only one of the found columns; None if there is none."""
    if len(found) > 1:
        raise UsageError(
            f"{ask.name} has several columns that may be the {role}, {_listed(found)}, of "
            f"{_listed(sample.values)}; choose with --{flag}."
        )
    return found[0] if found else None


def text_values(sample: Sample, column: str) -> list[str]:
    """The values of a column of text that are not empty; none if most have another type."""
    values = [value for value in sample.values[column] if value not in (None, "")]
    texts = [value for value in values if isinstance(value, str)]
    return texts if 2 * len(texts) > len(values) else []


def of_images(sample: Sample, column: str, called: Collection[str] = IMAGES) -> bool:
    """Whether a column has images, or most of its values are paths of images.

    called: names of columns whose images may all be missing.
    """
    values = text_values(sample, column)[:LOOKED_UP]
    if column in sample.images or sample.root is None or not values:
        return column in sample.images
    named = [Path(value).suffix.casefold() in SUFFIXES for value in values]
    if plain(column) in called and all(named):
        return True
    there = [
        known and os.path.isfile(sample.root / value)  # noqa: PTH113
        for known, value in zip(named, values, strict=True)
    ]
    return 2 * sum(there) >= len(values)


def _image(ask: Ask, sample: Sample, taken: set[str]) -> str | None:
    free = [column for column in sample.values if column not in taken]
    typed = [column for column in free if column in sample.images]
    found = typed or [column for column in free if of_images(sample, column)]
    called = [column for column in found if plain(column) == "image"]
    return _one(ask, sample, called or found, "image", "image-column")


def _texts(ask: Ask, sample: Sample, taken: set[str], image: str | None) -> tuple[str, ...]:
    def prose(column: str) -> bool:
        values = text_values(sample, column)
        return bool(values) and 2 * sum(" " in value.strip() for value in values) >= len(values)

    taken = taken | sample.images | sample.classes | {image or ""}
    free = {plain(c): c for c in sample.values if c not in taken and text_values(sample, c)}
    pairs = [tuple(free[part] for part in pair) for pair in PAIRS if free.keys() >= set(pair)]
    singles = [free[called] for called in free if called in TEXTS]
    if len(pairs) == 1 and set(singles) <= set(pairs[0]):
        return pairs[0]
    found = [column for pair in pairs for column in pair] + singles
    if not found and image is None:
        labels = [column for called, column in free.items() if called in LABELS]
        found = [column for column in free.values() if column not in labels and prose(column)]
    one = _one(ask, sample, list(dict.fromkeys(found)), "text", "text-column")
    return () if one is None else (one,)


def _label(ask: Ask, sample: Sample, used: Sequence[str]) -> str:
    one = _one(ask, sample, labels(ask, sample, used), "label", "label-column")
    if one is None:
        raise UsageError(
            f"none of the columns of {ask.name} is clearly the label: {_listed(sample.values)}; "
            "name one with --label-column."
        )
    return one
