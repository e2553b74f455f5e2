"""Refuses data that no model is for: tables by their columns, folders by their files."""

import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from razorctl.config.tasks import LANGUAGE
from razorctl.data.own import objects
from razorctl.data.own.read import conversations
from razorctl.data.own.read.column import SAMPLE, Column, columns_of
from razorctl.data.own.read.folder import SEEN, Folder
from razorctl.data.own.read.table import Table
from razorctl.data.own.request import SPLIT_NAMES, DataRequest
from razorctl.errors import UsageError
from razorctl.system import documents

AUDIO = ("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac")  # endings of files
LARGEST = 256 << 20  # bytes of a JSON document that is read to tell what it has
CONVERT = (
    "write them as conversations in a column messages for a causal-lm, or name a column of texts "
    "with --text-column"
)
TAGS = "write a CoNLL file, or lists of the tokens and the tags of each sentence"
ONE_TEXT = "name a column of texts with --text-column"
CLASSES = "name columns with --image-column and --label-column"
OBJECTS = f"write a column objects with lists called bbox and category for detection, or {CLASSES}"


class Kind(NamedTuple):
    """A kind of table that no model is for.

    Args:
        what: the kind, for a sentence.
        columns: the roles that columns have, or several such lists with / between them. A role is
            `name|other name`, or * for any column; a word of FITS may follow, `name:word`. No
            column may have a role after !.
        mend: ends the sentence.
        unlabeled: whether the table is of this kind only without a column that may be a label.
    """

    what: str
    columns: str
    mend: str
    unlabeled: bool = False


BOXES = "boxes of objects in images (object detection)"
ANSWERS, TALKS = "|".join(conversations.ANSWER), "|".join(conversations.MESSAGES)
LANGUAGES = "en|de|fr|es|it|pt|nl|ru|zh|ja|ar|hi"
SOURCE = "source|src|input|source_text|input_text"
TARGET = "target|tgt|output|target_text|output_text"
KINDS = (
    Kind("entities by their first and last characters (spans)",
         "*:spans / text|sentence:unasked start|start_offset|start_char|begin "
         "end|end_offset|end_char", TAGS),
    Kind("conversations with images, videos or sounds",
         f"{TALKS} image|images|video|videos|audio|audios:filled",
         "name conversations without them, or a column of texts with --text-column"),
    Kind("messages that are the nodes of trees (OASST)", "message_id parent_id text role", CONVERT),
    Kind("sound", "*:sounds / audio:alike", f"{ONE_TEXT}, or choose other data"),
    Kind(BOXES, "*:repeated_image xmin|x_min|x1 ymin|y_min|y1 xmax|x_max|x2 ymax|y_max|y2",
         OBJECTS),
    Kind(BOXES, "*:image bboxes|bbox|boxes|bounding_boxes|bounding_box:nested",
         OBJECTS, unlabeled=True),
    Kind("questions on images (visual question answering)",
         "*:image question answer|answers|multiple_choice_answer", CLASSES),
    Kind("images with captions (CLIP)",
         "*:images caption|captions|text|description|sentence|sentences:uncaptioned",
         f"choose a model of images and texts with --task embedding, {CLASSES}, or texts with "
         "--text-column", unlabeled=True),
    Kind("answers that are chosen or rejected (preference pairs, DPO)",
         "chosen rejected / response_0 response_1 / response_a response_b / "
         "conversation_a conversation_b", CONVERT),
    Kind("answers marked as good or bad (preferences, KTO)", "prompt completion label", CONVERT),
    Kind("steps of answers with a mark each (process rewards, PRM)", "prompt completions labels",
         CONVERT),
    Kind("prompts without answers (reinforcement learning: GRPO, PPO)",
         f"prompt:only_texts !{ANSWERS}", CONVERT),
    Kind("similar texts (pairs or triplets for embeddings)", "anchor:unlearned positive",
         f"choose a model of texts with --task embedding, or {ONE_TEXT}"),
    Kind("questions on a context (extractive question answering, SQuAD)",
         "question context answers|answer", CONVERT),
    Kind("a token on each row",
         "word|token tag|ner|ner_tag|entity|label "
         "sentence_#|sentence_id|sent_id|sentence_number|sentence_idx|sentence", TAGS),
    Kind("questions with a choice of answers (multiple choice)",
         "question|query|prompt|ctx|context|sentence choices|options|endings:lists", CONVERT),
    Kind("texts and translations",
         f"translation|translations:objects / {LANGUAGES}:texts {LANGUAGES}:others", CONVERT),
    Kind("texts and summaries",
         "text|document|article|dialogue:texts summary|highlights:texts !instruction", CONVERT,
         unlabeled=True),
    Kind("sources and targets (text to text)", f"{SOURCE}:texts {TARGET}:texts !instruction",
         CONVERT, unlabeled=True),
)  # fmt: skip


def _most(fits: Callable[[Any], bool]) -> Callable[[Table, Column], bool]:
    """A function that tells whether most values of a column fit."""

    def most(_: Table, column: Column) -> bool:
        return bool(column.present) and 2 * sum(map(fits, column.present)) > len(column.present)

    return most


def _is_sound(value: Any) -> bool:
    path = value.get("path") if isinstance(value, Mapping) else value
    return isinstance(path, str) and Path(path).suffix.casefold()[1:] in AUDIO


def _has_spans(table: Table, column: Column) -> bool:
    """Whether a column has spans, and options name no others."""
    asked = not table.request.columns or column.name == table.request.label_column
    return asked and table.request.task not in LANGUAGE and column.has_spans


# Word -> whether a column fits it by its values.
FITS: Mapping[str, Callable[[Table, Column], bool]] = {
    "": lambda table, column: True,
    "filled": lambda table, column: bool(column.present),
    "texts": lambda table, column: column.varied,
    "others": lambda table, column: column.varied,
    "alike": lambda table, column: not column.varied,
    "only_texts": lambda table, column: (
        [each for each in table.columns.values() if each.varied] == [column]
    ),
    "unlearned": lambda table, _: table.request.embeds != "text",
    "uncaptioned": lambda table, _: table.request.embeds != "image",
    "unasked": lambda table, _: not table.request.columns and table.request.task not in LANGUAGE,
    "lists": lambda table, column: column.has_lists(),
    "objects": _most(lambda value: isinstance(value, Mapping)),
    "nested": _most(lambda value: isinstance(value, (list, Mapping))),
    "sounds": _most(_is_sound),
    "images": lambda table, column: column in table.images,
    "image": lambda table, column: [column] == table.images[:1],
    "repeated_image": lambda table, column: (
        [column] == table.images[:1] and len({*column.texts}) < len(column.texts)
    ),
    "spans": _has_spans,
}


def _signs(kind: Kind, table: Table) -> Sequence[Column]:
    """The columns that show that a table is of a kind; none if it is not."""
    for roles in kind.columns.split(" / "):
        columns: list[Column] = []
        for role in roles.split():
            names, _, word = role.removeprefix("!").partition(":")
            called = [table.by_key[key] for key in names.split("|") if key in table.by_key]
            candidates = [*table.columns.values()] if names == "*" else called[:1]
            if word == "others":
                candidates = [column for column in called if column not in columns][:1]
            fitting = [column for column in candidates if FITS[word](table, column)]
            if bool(fitting) == role.startswith("!"):
                break
            columns += fitting
        else:
            if not (kind.unlabeled and table.may_have_label(columns)):
                return [*dict.fromkeys(columns)]
    return ()


def refuse_table(table: Table) -> None:
    """Raises UsageError for a table of one of KINDS.

    If options name columns, the names are clear, or there are boxes for a model that finds objects,
    only spans are refused, the first of KINDS.
    """
    name, settled = table.request.name, table.request.columns or table.clear
    if "detection" in table.request.tasks:
        settled |= any(objects.are_in(column.present) for column in table.columns.values())
    for kind in KINDS[:1] if settled else KINDS:
        if columns := _signs(kind, table):
            sign = f"its column{'s' if len(columns) > 1 else ''} "
            sign += ", ".join(column.name for column in columns)
            raise _refused(name, kind.what, sign, kind.mend)


def _refused(name: str, what: str, sign: str, mend: str) -> UsageError:
    return UsageError(f"{name} has {what}, by {sign}, which razorctl does not read; {mend}.")


def refuse_document(request: DataRequest, file: Path) -> UsageError:
    """Raises UsageError for a JSON document of one of KINDS; returns the error for any other."""
    document: Any = None
    if file.stat().st_size <= LARGEST:
        with suppress(ValueError):
            document = documents.parse(documents.read_bytes(file))
    if isinstance(document, dict) and isinstance(document.get("data"), list):
        document = document["data"]
        if any(isinstance(row, dict) and "paragraphs" in row for row in document):
            document = [{"question": "", "context": "", "answers": []}]
    first = document[:SAMPLE] if isinstance(document, list) else []
    rows = [row for row in first if isinstance(row, dict)]
    names = dict.fromkeys(column for row in rows for column in row)
    values = {column: [row.get(column) for row in rows] for column in names}
    refuse_table(Table(request, columns_of(values, {}, file.parent)))
    return UsageError(
        f"{request.name} is one JSON document, not a list; write a list of objects, or JSONL, with "
        "an object on each line."
    )


class FolderKind(NamedTuple):
    """A kind of folder that no model is for.

    Args:
        what: the kind, for a sentence.
        file: a pattern for the path, in the folder, of a file of this kind.
        mend: ends the sentence.
        content: patterns that are all in that file.
        beside: whether an image must have the name of that file, as `Folder.images_for` tells.
        alone: whether the folder must have no images.
        unsorted: whether the folder must be `Folder.unsorted`.
    """

    what: str
    file: str
    mend: str
    content: Sequence[bytes] = ()
    beside: bool = False
    alone: bool = False
    unsorted: bool = False


SPLITS = "|".join(name for names in SPLIT_NAMES.values() for name in names)
FOLDERS = (
    FolderKind("sound", rf".*\.(?i:{'|'.join(AUDIO)})", "choose other data", alone=True),
    FolderKind("images with captions", r"[^/]*\.(?i:txt)",
               "choose a model of images and texts with --task embedding, or give a folder of "
               "images for each class", beside=True),
    FolderKind("images of no class", rf"(?i:{SPLITS})/.*", "give a folder for each class inside it",
               unsorted=True),
)  # fmt: skip


def has(file: Path, content: Sequence[bytes]) -> bool:
    """Whether all patterns are in a file."""
    with (
        suppress(OSError, ValueError),  # it may be empty
        documents.open_regular(file) as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text,
    ):
        return all(re.search(pattern, text) for pattern in content)
    return False


def sign(kind: FolderKind, folder: Folder) -> Path | None:
    """The file, or the folder of a split, that shows the kind of a folder; None for others."""
    if (kind.alone and folder.images) or (kind.unsorted and not folder.unsorted):
        return None
    for file in islice(folder.matches(kind.file), SEEN):
        beside = not kind.beside or file.stem in folder.stems(folder.images_for(file))
        if beside and (not kind.content or has(file, kind.content)):
            return file.parent if kind.unsorted else file
    return None


def refuse_folder(name: str, folder: Folder) -> None:
    """Raises UsageError for a folder of one of FOLDERS."""
    for kind in FOLDERS:
        if (shown := sign(kind, folder)) is not None:
            raise _refused(name, kind.what, str(shown.relative_to(folder.top)), kind.mend)
