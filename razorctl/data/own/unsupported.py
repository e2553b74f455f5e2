"""Tables that no model is for: they are refused by what they are, which their columns tell."""

import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from razorctl import documents
from razorctl.data.own import columns
from razorctl.data.own.ask import Ask
from razorctl.data.own.columns import LABELS, TEXTS, Sample
from razorctl.data.own.labels import DECIMAL
from razorctl.errors import UsageError

AUDIO = frozenset(f".{ending}" for ending in ("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac"))
LANGUAGES = frozenset(("en", "de", "fr", "es", "it", "pt", "nl", "ru", "zh", "ja", "ar", "hi"))
CORNERS = ("xmin|x_min|x1", "ymin|y_min|y1", "xmax|x_max|x2", "ymax|y_max|y2")
ANSWER = "output|response|answer|completion"
SOURCE = "source|src|input|source_text|input_text"
TARGET = "target|tgt|output|target_text|output_text"
LARGEST = 256 << 20  # bytes of a JSON document that is read to tell what it has
COCO = (rb'"images"\s*:', rb'"annotations"\s*:', rb'"(bbox|segmentation)"\s*:')
CONVERT = (
    "write them as conversations in a column messages for a causal-lm, or name a column of texts "
    "with --text-column"
)
ONE_TEXT = "name a column of texts with --text-column"
CLASSES = "name columns with --image-column and --label-column"


@dataclass(frozen=True)
class Table:
    """The first rows of a table."""

    ask: Ask
    sample: Sample

    def called(self, *roles: str) -> list[str]:
        """The columns that are called as each of the roles, such as `a|b`; none if one lacks."""
        own = {columns.plain(column): column for column in self.sample.values}
        found = [next((own[n] for n in role.split("|") if n in own), None) for role in roles]
        return [column for column in found if column is not None] if all(found) else []

    def values(self, column: str) -> list[Any]:
        return [value for value in self.sample.values[column] if value not in (None, "")]

    def most(self, column: str, fits: Callable[[Any], bool]) -> bool:
        values = self.values(column)
        return bool(values) and 2 * sum(map(fits, values)) > len(values)

    def lists(self, column: str) -> bool:
        return self.most(column, lambda value: isinstance(value, list))

    def varied(self, *found: str) -> bool:
        """Whether each column has texts that are mostly its own, so that they are no classes."""
        texts = [columns.text_values(self.sample, column) for column in found]
        return bool(texts) and all(len(of) > 2 and 2 * len(set(of)) > len(of) for of in texts)

    def labeled(self, *used: str) -> bool:
        """Whether a column beside those may be the label of a classifier, as far as is known."""
        free = {*self.sample.values} - {*used} - self.sample.images
        unknown = any(len(self.sample.values[column]) < 2 for column in free)
        return unknown or bool(columns.labels(self.ask, self.sample, used))

    @cached_property
    def image(self) -> list[str]:
        """The columns of images."""
        typed = [c for c in self.sample.values if c in self.sample.images]
        return typed or [c for c in self.sample.values if columns.of_images(self.sample, c)]

    @property
    def clear(self) -> bool:
        """Whether columns are called a text and its label, or an image and its label."""
        own = {columns.plain(c): c for c in self.sample.values}
        label = [own[name] for name in own.keys() & LABELS if not self.lists(own[name])]
        return bool(label) and bool(own.keys() & TEXTS)


@dataclass(frozen=True)
class Kind:
    """Data that no model is trained for. looks: gives the columns that tell, or none."""

    what: str
    looks: Callable[[Table], Sequence[str]]
    mend: str


def _varied(*roles: str) -> Callable[[Table], Sequence[str]]:
    def looks(table: Table) -> Sequence[str]:
        found = table.called(*roles)
        return found if table.varied(*found) else ()

    return looks


def _choices(table: Table) -> Sequence[str]:
    found = table.called("question|query|prompt|ctx|context|sentence", "choices|options|endings")
    return found if found and table.lists(found[1]) else ()


def _tags(table: Table) -> Sequence[str]:
    words = [c for c in table.called("tokens|words|token|word") if table.lists(c)]
    ends = ("tags", "tag", "labels", "label")
    tags = [c for c in table.sample.values if columns.plain(c).endswith(ends) and table.lists(c)]
    return [*words, *tags[:1]] if words and tags else ()


def _translations(table: Table) -> Sequence[str]:
    found = table.called("translation|translations")
    if found and table.most(found[0], lambda value: isinstance(value, Mapping)):
        return found
    spoken = [c for c in table.sample.values if columns.plain(c) in LANGUAGES]
    return spoken if len(spoken) > 1 and table.varied(*spoken) else ()


def _summaries(table: Table) -> Sequence[str]:
    found = table.called("text|document|article|dialogue", "summary|highlights")
    return found if table.varied(*found) and not table.labeled(*found) else ()


def _numbers(table: Table) -> Sequence[str]:
    """A text with a decimal number, for a model that is mostly a classifier."""
    found = table.called("score|rating|similarity|similarity_score|stars")

    def decimal(value: Any) -> bool:
        whole = isinstance(value, float) and value.is_integer()
        return (isinstance(value, float) and not whole) or bool(DECIMAL.fullmatch(str(value)))

    if table.ask.tasks[0] != "classification" or not found or not table.most(found[0], decimal):
        return ()
    texts = [c for c in table.sample.values if columns.text_values(table.sample, c)]
    return found if texts and not table.labeled(*texts, *found) else ()


def _boxes(table: Table) -> Sequence[str]:
    image = table.image[:1]
    if not image:
        return ()
    own = table.called(*CORNERS)
    paths = columns.text_values(table.sample, image[0])
    if own and len(set(paths)) < len(paths):  # an image for each object in it
        return [*image, *own]
    found = table.called("objects|bboxes|bbox|boxes|bounding_boxes|bounding_box")
    nested = found and table.most(found[0], lambda value: isinstance(value, (list, Mapping)))
    return [*image, *found] if nested and not table.labeled(*image, *found) else ()


def _asked(table: Table) -> Sequence[str]:
    found = table.called("question", "answer|answers|multiple_choice_answer")
    return [*table.image[:1], *found] if found and table.image else ()


def _captions(table: Table) -> Sequence[str]:
    image = table.image[:1]
    found = table.called("caption|captions|text|description|sentence|sentences")
    if not image or not found or table.labeled(*table.image, *found):
        return ()
    return [*image, *found]


def _sounds(table: Table) -> Sequence[str]:
    def sound(value: Any) -> bool:
        path = value.get("path") if isinstance(value, Mapping) else value
        return isinstance(path, str) and Path(path).suffix.casefold() in AUDIO

    own = [c for c in table.sample.values if table.most(c, sound)]
    return own or [c for c in table.called("audio") if not table.varied(c)]


KINDS = (
    Kind("one document of images, annotations and categories (COCO)",
         lambda table: table.called("images", "annotations", "categories"),
         "give folders images and masks, or a table with an image and a label on each row"),
    Kind("sound", _sounds, f"{ONE_TEXT}, or choose other data"),
    Kind("boxes of objects in images (object detection)", _boxes, CLASSES),
    Kind("questions on images (visual question answering)", _asked, CLASSES),
    Kind("images with captions (CLIP)", _captions, f"{CLASSES}, or texts with --text-column"),
    Kind("answers that are chosen or rejected (preference pairs, DPO)",
         lambda table: table.called("chosen", "rejected"), CONVERT),
    Kind("answers marked as good or bad (preferences, KTO)",
         lambda table: table.called("prompt", "completion", "label"), CONVERT),
    Kind("alike texts (pairs or triplets for embeddings)",
         lambda table: table.called("anchor", "positive"), ONE_TEXT),
    Kind("questions on a context (extractive question answering, SQuAD)",
         lambda table: table.called("question", "context", "answers|answer"), CONVERT),
    Kind("questions with a choice of answers (multiple choice)", _choices, CONVERT),
    Kind("tokens with a tag each (named entities, token classification)", _tags, ONE_TEXT),
    Kind("texts and translations", _translations, CONVERT),
    Kind("texts and summaries", _summaries, CONVERT),
    Kind("instructions and answers", _varied("instruction", ANSWER), CONVERT),
    Kind("prompts and answers", _varied("prompt", ANSWER), CONVERT),
    Kind("questions and answers", _varied("question|query", ANSWER), CONVERT),
    Kind("sources and targets (text to text)", _varied(SOURCE, TARGET), CONVERT),
    Kind("texts with a decimal number each (regression)", _numbers,
         "write classes, and name their column with --label-column"),
)  # fmt: skip


def refuse(ask: Ask, sample: Sample) -> None:
    """Raises UsageError for a table of one of KINDS, unless its columns are given or clear."""
    table = Table(ask, sample)
    if ask.columns or table.clear:
        return
    for kind in KINDS:
        if found := kind.looks(table):
            many = "s" if len(found) > 1 else ""
            raise refused(ask.name, kind.what, f"its column{many} {', '.join(found)}", kind.mend)


def refused(name: str, what: str, sign: str, mend: str) -> UsageError:
    return UsageError(f"{name} has {what}, by {sign}, which razorctl has no task for; {mend}.")


def refuse_document(ask: Ask, file: Path) -> UsageError:
    """Raises UsageError for a JSON document of one of KINDS; returns that for any other."""
    found: Any = None
    if coco(file):
        found = [{"images": [], "annotations": [], "categories": []}]
    elif file.stat().st_size <= LARGEST:
        with suppress(ValueError):
            found = documents.parse(documents.read_bytes(file))
    if isinstance(found, dict) and isinstance(found.get("data"), list):
        found = found["data"]
        if any(isinstance(row, dict) and "paragraphs" in row for row in found):
            found = [{"question": "", "context": "", "answers": []}]
    listed = found[: columns.SAMPLE] if isinstance(found, list) else []
    rows = [row for row in listed if isinstance(row, dict)]
    called = dict.fromkeys(column for row in rows for column in row)
    values = {column: [row.get(column) for row in rows] for column in called}
    refuse(ask, Sample(values, root=file.parent))
    return UsageError(
        f"{ask.name} is one JSON document; write JSONL, with an object on each line, as "
        f"`jq -c .[] {ask.name}` does of a list."
    )


def coco(file: Path) -> bool:
    """Whether a JSON file has boxes or outlines of objects as COCO has them."""
    with (
        suppress(OSError, ValueError),  # it may be empty
        documents.open_regular(file) as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return all(re.search(sign, content) for sign in COCO)
    return False
