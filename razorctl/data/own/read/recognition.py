"""The task that a table is for, by its columns, or the kind of data that no model is for."""

import mmap
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from razorctl import models
from razorctl.config.tasks import LANGUAGE, OF_ROWS, Task
from razorctl.data.own.read import columns, conversations
from razorctl.data.own.read.columns import LABELS, TEXTS
from razorctl.data.own.read.sample import SAMPLE, Sample, normalized_name
from razorctl.data.own.read.table_columns import TableColumns
from razorctl.data.own.request import DataRequest
from razorctl.errors import UsageError
from razorctl.system import documents

AUDIO = frozenset(f".{ending}" for ending in ("wav", "flac", "mp3", "ogg", "opus", "m4a", "aac"))
LANGUAGES = frozenset(("en", "de", "fr", "es", "it", "pt", "nl", "ru", "zh", "ja", "ar", "hi"))
ANSWERS = "|".join(conversations.ANSWER)
CORNERS = ("xmin|x_min|x1", "ymin|y_min|y1", "xmax|x_max|x2", "ymax|y_max|y2")
SOURCE = "source|src|input|source_text|input_text"
TARGET = "target|tgt|output|target_text|output_text"
LONG, SHORT = "text|document|article|dialogue", "summary|highlights"
START, END = "start|start_offset|start_char|begin", "end|end_offset|end_char"
JOINED = re.compile(r"\w+((\s*[,;:|^~]+\s*|\s{2,})\w+)+")  # a column that may be several
LARGEST = 256 << 20  # bytes of a JSON document that is read to tell what it has
COCO = (rb'"images"\s*:', rb'"annotations"\s*:', rb'"(bbox|segmentation)"\s*:')
CONVERT = (
    "write them as conversations in a column messages for a causal-lm, or name a column of texts "
    "with --text-column"
)
TAGS = "write a CoNLL file, or lists of the tokens and the tags of each sentence"
ONE_TEXT = "name a column of texts with --text-column"
CLASSES = "name columns with --image-column and --label-column"


def table_columns(request: DataRequest, sample: Sample) -> TableColumns:
    """The task that a table is for, and the columns that it uses.

    A given task settles it. Otherwise conversations are for causal-lm, images with masks for
    segmentation, what has labels for classification, regression or multi-label, and texts alone for
    the first task of the model that models language, as far as the model is for these. If that is
    its most usual task, only a column that is a label by name or type counts as one.
    Raises what `classifier_columns` raises, and UsageError if the table does not serve the given
    task or is of one of KINDS.
    """
    found = _columns_of(request, sample)
    columns.refuse_misread(request, sample, found)
    return replace(found, unused=tuple(c for c in sample.values if c not in found.renamed))


def _columns_of(request: DataRequest, sample: Sample) -> TableColumns:
    tasks = request.tasks
    refuse_kinds(request, sample)
    chat = None if Table(request, sample).clear else conversations.columns_of(request, sample)
    if chat is not None:
        if "causal-lm" in tasks:
            return chat
        what = "conversations" if chat.get("messages") else "prompts and answers"
        raise for_other_models(request, what, "causal-lm", ONE_TEXT)
    found = _tagged(request, sample)
    if found is not None:
        return found
    if "segmentation" in tasks or request.label_column is None:
        image, mask = columns.image_and_mask(request, sample)
        if image is not None and mask is not None:
            if "segmentation" in tasks:
                return TableColumns.of("segmentation", image=image, mask=mask)
            override = "name the column of classes with --label-column"
            raise for_other_models(request, "images with masks", "segmentation", override)
    text = None if request.language is None else columns.single_text(request, sample)
    if text is not None and (alone := _text_alone(request, sample, text)) is not None:
        return alone
    if not {*OF_ROWS} & {*tasks}:
        raise unserved(request, f", only the columns {', '.join(sample.values)}")
    return columns.classifier_columns(request, sample)


def _tagged(request: DataRequest, sample: Sample) -> TableColumns | None:
    """The columns of tokens and their tags; None of a table without.

    Raises UsageError where these are what no task is for.
    """
    tokens, tags = columns.tokens_and_tags(request, sample)
    if tokens is not None and tags is not None:
        if "token-classification" in request.tasks:
            return TableColumns.of("token-classification", tokens=tokens, tags=tags)
        raise for_other_models(request, "tokens with a tag each", "token-classification", ONE_TEXT)
    if request.task == "token-classification":
        raise unserved(request, f", only the columns {', '.join(sample.values)}")
    return None


def _text_alone(request: DataRequest, sample: Sample, text: str) -> TableColumns | None:
    """The column of texts that a language model learns; None if others may be labels.

    It is never taken because nothing else is found: raises UsageError for a table with more columns
    of which none is clearly the label, unless the task or, for a language model, the text is given.
    """
    language, classifies = request.language, bool({*OF_ROWS} & {*request.tasks})
    usual = request.tasks[0] == language
    if classifies and columns.label_candidates(request, sample, [text], by_name=usual):
        return None
    assert language is not None
    if request.label_column is not None:
        raise UsageError(f"{language} learns from texts alone; leave --label-column out.")
    others = [column for column in sample.values if column != text]
    if not (others or request.task or request.text_column) and JOINED.fullmatch(text):
        raise UsageError(
            f"{request.name} has one column, {text}, which looks like several; write them with "
            f"commas, or learn each line as a text with --task {language}."
        )
    if others and classifies and not (usual and request.text_column):
        raise UsageError(
            f"{request.name} has texts in {text}, and none of its other columns is clearly the "
            f"label: {', '.join(others)}; name one with --label-column, or learn the texts alone "
            f"with --task {language}."
        )
    return TableColumns.of(language, text=text)


def unserved(request: DataRequest, more: str = "") -> UsageError:
    """The error for data that serve none of the tasks.

    more: what they have instead, as a part of the sentence.
    """
    name, task = request.name, request.tasks[0]
    if "segmentation" in request.tasks:
        return UsageError(
            f"{name} has no images with masks, which segmentation learns from{more}; give folders "
            "images and masks, or a table with --image-column and the masks in --label-column."
        )
    if task == "token-classification":
        return UsageError(
            f"{name} has no lists of tokens with a tag each, which {task} learns from{more}; give "
            "a CoNLL file, or a table with --text-column and --label-column."
        )
    if task in OF_ROWS:
        return UsageError(
            f"{name} has no label for each row, which {task} learns from{more}; give a table with "
            "--label-column."
        )
    return UsageError(
        f"{name} has no single column or files of texts, which {task} learns from{more}; give TXT "
        "files, or a table with --text-column."
    )


def for_other_models(request: DataRequest, what: str, task: Task, override: str) -> UsageError:
    """The error for data of a task that the model is not for; names the models that are.

    Args:
        request: what is asked of the data.
        what: what the data have, in words.
        task: what they are for.
        override: the option that settles otherwise what they are for.
    """
    if request.task is not None:
        return UsageError(
            f"{request.name} has {what}, which are for {task}, not for {request.task}; leave "
            f"--task out, or {override}."
        )
    able = [model.name for model in models.models().values() if task in model.tasks]
    return UsageError(
        f"{request.name} has {what}, which are for {task}, and {request.model} is not; choose one "
        f"of {', '.join(able)}, or {override}."
    )


@dataclass(frozen=True)
class Table:
    """The first rows of a table, and what is asked of it."""

    request: DataRequest
    sample: Sample

    @cached_property
    def names(self) -> dict[str, str]:
        """The normalized name of each column -> the column."""
        return {normalized_name(column): column for column in self.sample.values}

    def columns_for(self, *roles: str) -> list[str]:
        """The columns that have one of the names of each role, `a|b`; none if one is missing."""
        matches = [[n for n in role.split("|") if n in self.names][:1] for role in roles]
        return [self.names[name] for match in matches for name in match] if all(matches) else []

    def most(self, column: str, fits: Callable[[Any], bool]) -> bool:
        """Whether most values of a column fit."""
        values = self.sample.present(column)
        return bool(values) and 2 * sum(map(fits, values)) > len(values)

    def may_have_label(self, *inputs: str) -> bool:
        """Whether a column beside the inputs may be the label of a classifier."""
        free = {*self.sample.values} - {*inputs} - self.sample.images
        unclear = any(len(self.sample.values[column]) < 2 for column in free)
        return unclear or bool(columns.label_candidates(self.request, self.sample, inputs))

    def written_from(self, one: str, other: str) -> Sequence[str]:
        """The columns of texts and of others made of these; none if there may be a label."""
        names = self.columns_for(one, other)
        instructed = self.columns_for("instruction")  # Alpaca's, with its input and output
        varied = self.sample.varied(*names) and not instructed
        return names if varied and not self.may_have_label(*names) else ()

    @cached_property
    def images(self) -> list[str]:
        """The columns of images."""
        return self.sample.image_columns()

    @property
    def clear(self) -> bool:
        """Whether columns are called a text and its label, or an image and its label."""
        names = self.names.keys()
        return bool(names & LABELS) and bool(names & TEXTS)


@dataclass(frozen=True)
class Kind:
    """Data that no model is trained for. signs: gives the columns that tell, or none."""

    what: str
    signs: Callable[[Table], Sequence[str]]
    mend: str


def _prompts(table: Table) -> Sequence[str]:
    names = table.columns_for("prompt")
    texts = [column for column in table.sample.values if table.sample.varied(column)]
    return names if texts == names and not table.columns_for(ANSWERS) else ()


# The columns of two answers of which one is better.
RIVALS = (
    *(("chosen", "rejected"), ("response_0", "response_1"), ("response_a", "response_b")),
    ("conversation_a", "conversation_b"),
)


def _preferences(table: Table) -> Sequence[str]:
    return next(filter(None, (table.columns_for(*pair) for pair in RIVALS)), ())


def _seen(table: Table) -> Sequence[str]:
    """The columns of conversations with images, videos or sounds."""
    talks = table.columns_for("|".join(conversations.MESSAGES))
    shown = table.columns_for("image|images|video|videos|audio|audios")
    return [*talks, *shown] if talks and shown and table.sample.present(shown[0]) else ()


def _single_tokens(table: Table) -> Sequence[str]:
    return (
        table.columns_for("word|token", "tag|ner|ner_tag|entity|label")
        if table.columns_for("sentence_#|sentence_id|sent_id|sentence_number|sentence_idx|sentence")
        else ()
    )


def _choices(table: Table) -> Sequence[str]:
    names = table.columns_for(
        "question|query|prompt|ctx|context|sentence", "choices|options|endings"
    )
    return names if names and table.sample.has_lists(names[1]) else ()


def _translations(table: Table) -> Sequence[str]:
    names = table.columns_for("translation|translations")
    if names and table.most(names[0], lambda value: isinstance(value, Mapping)):
        return names
    spoken = [c for c in table.sample.values if normalized_name(c) in LANGUAGES]
    return spoken if len(spoken) > 1 and table.sample.varied(*spoken) else ()


def _boxes(table: Table) -> Sequence[str]:
    image = table.images[:1]
    if not image:
        return ()
    corners = table.columns_for(*CORNERS)
    paths = table.sample.texts(image[0])
    if corners and len(set(paths)) < len(paths):  # an image for each object in it
        return [*image, *corners]
    names = table.columns_for("objects|bboxes|bbox|boxes|bounding_boxes|bounding_box")
    nested = names and table.most(names[0], lambda value: isinstance(value, (list, Mapping)))
    return [*image, *names] if nested and not table.may_have_label(*image, *names) else ()


def _questions(table: Table) -> Sequence[str]:
    names = table.columns_for("question", "answer|answers|multiple_choice_answer")
    return [*table.images[:1], *names] if names and table.images else ()


def _captions(table: Table) -> Sequence[str]:
    image = table.images[:1]
    names = table.columns_for("caption|captions|text|description|sentence|sentences")
    if not image or not names or table.may_have_label(*table.images, *names):
        return ()
    return [*image, *names]


def _sounds(table: Table) -> Sequence[str]:
    def sound(value: Any) -> bool:
        path = value.get("path") if isinstance(value, Mapping) else value
        return isinstance(path, str) and Path(path).suffix.casefold() in AUDIO

    sounds = [c for c in table.sample.values if table.most(c, sound)]
    return sounds or [c for c in table.columns_for("audio") if not table.sample.varied(c)]


def _spans(table: Table) -> Sequence[str]:
    request = table.request
    named = [c for c in table.sample.values if not request.columns or c == request.label_column]
    listed = [*filter(table.sample.has_spans, named)]
    flat = [] if request.columns else table.columns_for("text|sentence", START, END)
    return () if request.task in LANGUAGE else listed or flat


KINDS = (
    Kind("entities by their first and last characters (spans)", _spans, TAGS),
    Kind("conversations with images, videos or sounds", _seen,
         "name conversations without them, or a column of texts with --text-column"),
    Kind("messages that are the nodes of trees (OASST)",
         lambda table: table.columns_for("message_id", "parent_id", "text", "role"), CONVERT),
    Kind("one document of images, annotations and categories (COCO)",
         lambda table: table.columns_for("images", "annotations", "categories"),
         "give folders images and masks, or a table with an image and a label on each row"),
    Kind("sound", _sounds, f"{ONE_TEXT}, or choose other data"),
    Kind("boxes of objects in images (object detection)", _boxes, CLASSES),
    Kind("questions on images (visual question answering)", _questions, CLASSES),
    Kind("images with captions (CLIP)", _captions, f"{CLASSES}, or texts with --text-column"),
    Kind("answers that are chosen or rejected (preference pairs, DPO)", _preferences, CONVERT),
    Kind("answers marked as good or bad (preferences, KTO)",
         lambda table: table.columns_for("prompt", "completion", "label"), CONVERT),
    Kind("steps of answers with a mark each (process rewards, PRM)",
         lambda table: table.columns_for("prompt", "completions", "labels"), CONVERT),
    Kind("prompts without answers (reinforcement learning: GRPO, PPO)", _prompts, CONVERT),
    Kind("alike texts (pairs or triplets for embeddings)",
         lambda table: table.columns_for("anchor", "positive"), ONE_TEXT),
    Kind("questions on a context (extractive question answering, SQuAD)",
         lambda table: table.columns_for("question", "context", "answers|answer"), CONVERT),
    Kind("a token on each row", _single_tokens, TAGS),
    Kind("questions with a choice of answers (multiple choice)", _choices, CONVERT),
    Kind("texts and translations", _translations, CONVERT),
    Kind("texts and summaries", lambda table: table.written_from(LONG, SHORT), CONVERT),
    Kind("sources and targets (text to text)",
         lambda table: table.written_from(SOURCE, TARGET), CONVERT),
)  # fmt: skip


def refuse_kinds(request: DataRequest, sample: Sample) -> None:
    """Raises UsageError for a table of one of KINDS, unless its columns are given or clear."""
    table = Table(request, sample)
    for kind in KINDS[:1] if request.columns or table.clear else KINDS:
        if names := kind.signs(table):
            many = "s" if len(names) > 1 else ""
            raise refused(
                request.name, kind.what, f"its column{many} {', '.join(names)}", kind.mend
            )


def refused(name: str, what: str, sign: str, mend: str) -> UsageError:
    return UsageError(f"{name} has {what}, by {sign}, which razorctl has no task for; {mend}.")


def refuse_document(request: DataRequest, file: Path) -> UsageError:
    """Raises UsageError for a JSON document of one of KINDS; returns that for any other."""
    document: Any = None
    if coco(file):
        document = [{"images": [], "annotations": [], "categories": []}]
    elif file.stat().st_size <= LARGEST:
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
    refuse_kinds(request, Sample(values, root=file.parent))
    return UsageError(
        f"{request.name} is one JSON document, not a list; write a list of objects, or JSONL, with "
        "an object on each line."
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
