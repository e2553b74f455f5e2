"""What data are for, by what they look like; what no model is for is refused by its name."""

import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from razorctl import documents, models
from razorctl.data.own import columns, folder
from razorctl.data.own.ask import Ask, role
from razorctl.data.own.columns import LABELS, SUFFIXES, TEXTS, Columns, Sample
from razorctl.data.own.labels import DECIMAL
from razorctl.errors import UsageError
from razorctl.job import Task

AUDIO = frozenset(f".{ending}" for ending in ("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac"))
LANGUAGES = frozenset(("en", "de", "fr", "es", "it", "pt", "nl", "ru", "zh", "ja", "ar", "hi"))
CORNERS = ("xmin|x_min|x1", "ymin|y_min|y1", "xmax|x_max|x2", "ymax|y_max|y2")
ANSWER = "output|response|answer|completion"
SOURCE = "source|src|input|source_text|input_text"
TARGET = "target|tgt|output|target_text|output_text"
LARGEST = 256 << 20  # bytes of a JSON document that is read to tell what it has
SEEN = 50  # files of a folder that are looked at
OF_BOXES = ("annotations", "annotation", "labels", "xmls", "xml")  # folders
YOLO = re.compile(rb"\s*\d+(\s+[\d.eE+-]+){4,}\s*(\n|$)")
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
            raise _refused(ask.name, kind.what, f"its column{many} {', '.join(found)}", kind.mend)


def _refused(name: str, what: str, sign: str, mend: str) -> UsageError:
    return UsageError(f"{name} has {what}, by {sign}, which razorctl has no task for; {mend}.")


def of_others(ask: Ask, what: str, task: Task, override: str) -> UsageError:
    """The error for data of a task that is not wanted; names the models that are for it.

    what: the data have, in words. override: the option that settles otherwise what they are for.
    """
    if ask.task is not None:
        return UsageError(
            f"{ask.name} has {what}, which are for {task}, not for {ask.task}; leave --task out, "
            f"or {override}."
        )
    able = [model.name for model in models.models().values() if task in model.tasks]
    return UsageError(
        f"{ask.name} has {what}, which are for {task}, and {ask.model} is not; choose one of "
        f"{', '.join(able)}, or {override}."
    )


def detect(ask: Ask, sample: Sample) -> Columns:
    """The task that a table is for, and the columns that it uses.

    A given task settles it. Otherwise conversations are for causal-lm, images with masks for
    segmentation, what has a label for classification, and texts alone for the first task of the
    model that models language, as far as the model is for these. If that is its most usual task,
    only a column that is a label by name or type counts as one.
    Raises what `columns.detect` raises, and UsageError if the table does not serve the given task
    or is of one of KINDS.
    """
    tasks = ask.tasks
    refuse(ask, sample)
    if ask.text_column is None and ask.label_column is None:
        messages = columns.conversations(sample)
        if messages is not None and "causal-lm" in tasks:
            return Columns("", task="causal-lm", messages=messages)
        if messages is not None:
            override = "name a column of texts with --text-column"
            raise of_others(ask, "conversations", "causal-lm", override)
    if "segmentation" in tasks or ask.label_column is None:
        image, mask = columns.masked(ask, sample)
        if image is not None and mask is not None:
            if "segmentation" in tasks:
                return Columns("", image, task="segmentation", mask=mask)
            override = "name the column of classes with --label-column"
            raise of_others(ask, "images with masks", "segmentation", override)
    lm = ask.language
    if lm is not None:
        text = columns.text(ask, sample)
        named = tasks[0] == lm
        classes = "classification" in tasks
        if text is not None and not (classes and columns.labels(ask, sample, [text], named=named)):
            if ask.label_column is not None:
                raise UsageError(f"{lm} learns from texts alone; leave --label-column out.")
            return Columns("", texts=(text,), task=lm)
    if "classification" not in tasks:
        raise unserved(ask, f", only the columns {', '.join(sample.values)}")
    return columns.detect(ask, sample)


def unserved(ask: Ask, more: str = "") -> UsageError:
    """The error for data that serve none of the tasks; more: what they have instead."""
    name, task = ask.name, ask.tasks[0]
    if "segmentation" in ask.tasks:
        return UsageError(
            f"{name} has no images with masks, which segmentation learns from{more}; give folders "
            "images and masks, or a table with --image-column and the masks in --label-column."
        )
    return UsageError(
        f"{name} has no single column or files of texts, which {task} learns from{more}; give TXT "
        "files, or a table with --text-column."
    )


def refuse_document(ask: Ask, file: Path) -> UsageError:
    """Raises UsageError for a JSON document of one of KINDS; returns that for any other."""
    found: Any = None
    if _coco(file):
        found = [{"images": [], "annotations": [], "categories": []}]
    elif file.stat().st_size <= LARGEST:
        with suppress(ValueError):
            found = documents.parse(documents.contents(file))
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


def _coco(file: Path) -> bool:
    """Whether a JSON file has boxes or outlines of objects as COCO has them."""
    with (
        suppress(OSError, ValueError),  # it may be empty
        documents.regular(file) as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return all(re.search(sign, content) for sign in COCO)
    return False


def _begins(file: Path) -> bytes:
    """The first bytes of a file; none if it cannot be read."""
    with suppress(OSError), documents.regular(file) as stream:
        return stream.read(1 << 16)
    return b""


@dataclass(frozen=True)
class Folder:
    """What is in a folder: each folder below it -> the names of its folders and of its files."""

    top: Path
    inside: Mapping[Path, tuple[Sequence[str], Sequence[str]]]

    @classmethod
    def walked(cls, top: Path) -> "Folder":
        inside = {}
        for here, folders, files in os.walk(top):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            inside[Path(here)] = folders, [name for name in files if not name.startswith(".")]
        return cls(top, inside)

    def files(self, *endings: str) -> Iterator[Path]:
        """The first SEEN files of each folder that have one of these endings."""
        for here, (_, found) in self.inside.items():
            own = (name for name in found if Path(name).suffix.casefold() in endings)
            yield from (here / name for name in islice(own, SEEN))

    def stems(self, here: Path) -> set[str]:
        """The names of the images in a folder, without their endings."""
        found = map(Path, self.inside.get(here, ((), ()))[1])
        return {file.stem for file in found if file.suffix.casefold() in SUFFIXES}

    @cached_property
    def images(self) -> bool:
        return any(self.files(*SUFFIXES))

    @property
    def drawn(self) -> bool:
        """Whether it has images with masks, as `folder.layout` finds them."""
        near = [self.top, *(self.top / name for name in self.inside[self.top][0])]
        called = [{name.casefold() for name in self.inside[here][0]} for here in near]
        if not any(of & {*folder.IMAGES} and of & {*folder.MASKS} for of in called):
            return False
        parts = folder.layout(self.top) or {}
        return any(
            file.is_relative_to(of) for _, of in parts.values() for file in self.files(*SUFFIXES)
        )


def _documents(folder: Folder) -> Path | None:
    return next(filter(_coco, islice(folder.files(".json"), SEEN)), None)


def _lines(folder: Folder) -> Path | None:
    """A file with a class and a box on each line, beside its image or in `labels` for `images`."""
    for file in islice(folder.files(".txt"), SEEN):
        own = file.parent.relative_to(folder.top).parts
        if own and "labels" not in own and not role(own[-1]):
            continue  # a folder of a class, say
        beside = folder.top.joinpath(*("images" if part == "labels" else part for part in own))
        if file.stem in folder.stems(beside) and YOLO.match(_begins(file)):
            return file
    return None


def _xml(folder: Folder) -> Path | None:
    own = (file for file in folder.files(".xml") if file.parent.name.casefold() in OF_BOXES)
    return next((f for f in islice(own, SEEN) if b"<bndbox>" in _begins(f)), None)


def _recorded(folder: Folder) -> Path | None:
    return None if folder.images else next(folder.files(*AUDIO), None)


def _captioned(folder: Folder) -> Path | None:
    own = (file for file in folder.files(".txt") if file.parent == folder.top)
    return next((file for file in own if file.stem in folder.stems(folder.top)), None)


def _unsorted(folder: Folder) -> Path | None:
    """The first of folders that are called as splits and have images, but no folders of classes."""
    inside = [folder.top / name for name in folder.inside[folder.top][0]]
    split = inside and all(role(here.name) and not folder.inside[here][0] for here in inside)
    return inside[0] if split and folder.images else None


def _sorted_texts(folder: Folder) -> Path | None:
    """The first of the folders of classes of texts in those of splits."""
    splits = [folder.top / name for name in folder.inside[folder.top][0] if role(name)]
    if not splits or folder.images:
        return None
    classes = [folder.inside[here][0] for here in splits]
    alike = set(classes[0]).intersection(*classes)
    texts = {file.parent for file in folder.files(".txt")}
    found = [splits[0] / name for name in classes[0] if name in alike and splits[0] / name in texts]
    return found[0] if len(found) > 1 else None


class OfFolder(NamedTuple):
    """As `Kind`, for folders. looks: gives a file or folder that tells, or None."""

    what: str
    looks: Callable[[Folder], Path | None]
    mend: str
    usual: Task | None = None  # the usual task of models that take the folder for something else


MASKS = "give folders images and masks, or a folder of images for each class"
FOLDERS = (
    OfFolder("boxes or outlines of objects (COCO)", _documents, MASKS),
    OfFolder("boxes of objects (YOLO)", _lines, MASKS),
    OfFolder("boxes of objects (Pascal VOC)", _xml, MASKS),
    OfFolder("sound", _recorded, "choose other data"),
    OfFolder("images with captions", _captioned, "give a folder of images for each class"),
    OfFolder("images of no class", _unsorted, "give a folder for each class inside it"),
    OfFolder("a folder of texts for each class", _sorted_texts,
             "write a table with a text and a label on each row", "classification"),
)  # fmt: skip


def refuse_folder(ask: Ask, top: Path) -> None:
    """Raises UsageError for a folder of one of FOLDERS, and for masks that the model is not for."""
    folder = Folder.walked(top)
    if folder.drawn:
        if "segmentation" not in ask.tasks and ask.task is None:
            override = "give --task classification if its folders are classes"
            raise of_others(ask, "images with masks", "segmentation", override)
        return
    for kind in FOLDERS:
        if kind.usual in (None, ask.tasks[0]) and (found := kind.looks(folder)) is not None:
            raise _refused(ask.name, kind.what, str(found.relative_to(top)), kind.mend)
