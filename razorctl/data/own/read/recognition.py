"""Recognizes the task of a table, and the columns that this task uses."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from razorctl import models, units
from razorctl.config.job_checks import columns_as
from razorctl.config.tasks import LANGUAGE, OF_ROWS, Task
from razorctl.data.own.raw import TEXT_COLUMNS
from razorctl.data.own.read import box_columns, captions, conversations, pairs, tagged
from razorctl.data.own.read.column import Column, Columns, normalized
from razorctl.data.own.read.refused import ONE_TEXT, refuse_table
from razorctl.data.own.read.table import LABELS, TEXTS, Table, parts_of
from razorctl.data.own.read.table_columns import FLAG, ROLES, TableColumns
from razorctl.data.own.request import DataRequest
from razorctl.errors import UsageError
from razorctl.models import Modality

JOINED = re.compile(r"\w+((\s*[,;:|^~]+\s*|\s{2,})\w+)+")  # a column that may be several
MASKS = frozenset(
    {"mask", "masks", "annotation", "annotations", "segmentation", "label", "labels", "seg_map"}
    | {f"{what}_{of}" for what in ("mask", "annotation") for of in ("path", "file", "name")}
    | {"segmentation_mask", "semantic_mask", "label_image"}
)
TOKENS = ("tokens", "words", "token", "word")
TAGS = ("tags", "tag", "labels", "label")  # ends of names
# Role -> what a table with a column in this role has, for a sentence.
WORDS = {
    "messages": "conversations",
    "prompt": "prompts and answers",
    "tags": "tokens with a tag each",
    "mask": "images with masks",
    "objects": "images with boxes of objects",
    "text_pair": "similar texts",
}


def table_columns(request: DataRequest, columns: Columns) -> TableColumns:
    """The task of a table with these columns, and the columns that this task uses.

    --task names it. Otherwise it is the first of these that table and model allow: embedding for
    images with a column called caption, and for texts in a column called positive, causal-lm for
    conversations, token-classification for tokens with tags, segmentation for images with masks,
    the model's language task for texts alone, and a task with a label for each row.
    For a language model, only names and types of columns mark labels, and not their values.
    Raises what `Table` raises, and UsageError if the table does not serve the task or is of a kind
    that no model is for.
    """
    table = Table.for_run(request, columns)
    refuse_table(table)
    used = _columns_of(table)
    for alias, name in columns_as(request.column).items() if request.column else ():
        if name not in used.renamed:
            raise UsageError(
                f"for {used.task} no column is read as {alias}, so {name} of {request.name} would "
                f"not be used beside {used.details()}; leave it out of --column."
            )
    _refuse_misread(table, used)
    unused = tuple(name for name in columns if name not in used.renamed)
    return replace(used, unused=unused, notes=_number_notes(table, used))


def _columns_of(table: Table) -> TableColumns:
    request = table.request
    columns = next(filter(None, (columns_in(table) for columns_in in FINDERS)), None)
    if columns is None:
        raise unserved(request, f", only the columns {table.listed}")
    if columns.task not in request.tasks:
        what = next(words for role, words in WORDS.items() if columns.get(role))
        pictures = columns.get("image") is not None
        override = "name the column of classes with --label-column" if pictures else ONE_TEXT
        raise for_other_models(request, what, columns.task, override)
    return columns


def single_text(table: Table) -> Column | None:
    """The column of texts that are used alone; None if there is none, or only pairs of texts.

    A column called text is preferred.
    """
    texts = table.text_options
    if not texts:
        columns = table.columns.values()
        called = tuple(column for column in columns if column.key == "text" and column.texts)
        texts = called if len(called) == 1 else table.texts()
    return texts[0] if len(texts) == 1 else None


def _numbered(table: Table) -> dict[str, list[list[str]]]:
    """The columns of a CoNLL file, whose names are numbers; none for other tables."""
    columns = table.columns
    alike = all(name.isdigit() and columns[name].has_lists(str) for name in columns)
    return {name: columns[name].present for name in columns} if alike else {}


def tokens_of(table: Table) -> Column | None:
    """The column of lists of tokens; None if there is none, or options name other texts."""
    request, columns = table.request, table.columns
    if request.text_column is not None:
        texts = table.text_options
        return texts[0] if len(texts) == 1 and texts[0].has_lists(str) else None
    if numbered := _numbered(table):
        label = request.label_column
        name = tagged.token_column(numbered, [label] if label else tagged.tag_columns(numbered))
        return None if name is None else columns[name]
    lists = [column for column in columns.values() if column.has_lists(str)]
    called = [column for key in TOKENS for column in lists if column.key == key]
    return called[0] if called else None


def _tokens_and_tags(table: Table) -> TableColumns | None:
    """The columns of lists of tokens and of their tags; None if not clear.

    Of several columns of tags, a column of named entities counts.
    """
    tokens, label = tokens_of(table), table.request.label_column
    if tokens is None:
        return None
    if label is not None:
        column = table.named(label, "label-column")
        tags = column if column.has_lists() else None
    elif numbered := _numbered(table):
        columns = [table.columns[name] for name in tagged.tag_columns(numbered)]
        tags = table.only(columns, "tag", "label-column", tagged.listed(numbered))
    else:
        lists = [column for column in table.columns.values() if column.has_lists()]
        called = [column for column in lists if column is not tokens and column.key.endswith(TAGS)]
        entities = [column for column in called if column.key.startswith("ner")]
        tags = table.only(entities or called, "tag", "label-column")
    if tags is None:
        return None
    return TableColumns.of("token-classification", tokens=tokens, tags=tags)


def _image_and_mask(table: Table) -> TableColumns | None:
    """The columns of images and of masks, which --label-column names; None if not clear."""
    request = table.request
    others = request.label_column is not None or request.task == "token-classification"
    if others and "segmentation" not in request.tasks:
        return None
    image, labels = table.image_option, table.label_options
    if len(labels) > 1:
        return None
    if labels:
        mask = labels[0] if labels[0].has_images(named=True) else None
    else:
        called = [c for c in table.columns.values() if c is not image and c.key in MASKS]
        masks = [column for column in called if column.has_images(named=True)]
        mask = table.only(masks, "mask", "label-column")
    if image is None and mask is not None:
        image = table.image([mask])
    if image is None or mask is None:
        return None
    return TableColumns.of("segmentation", image=image, mask=mask)


def _text_alone(table: Table) -> TableColumns | None:
    """The column of texts that a language model learns; None if others may be labels.

    Raises UsageError for a table with more columns of which none is clearly the label, unless the
    task or, for a language model, the text is given.
    """
    request, language = table.request, table.request.language
    text = None if language is None else single_text(table)
    classifies, usual = bool({*OF_ROWS} & {*request.tasks}), request.tasks[0] == language
    if language is None or text is None:
        return None
    if classifies and table.labels([text], by_name=usual):
        return None
    if request.label_column is not None:
        raise UsageError(f"{language} learns from texts alone; leave --label-column out.")
    others = [other for other in table.columns if other != text.name]
    if not (others or request.task or request.text_column) and JOINED.fullmatch(text.name):
        raise UsageError(
            f"{request.name} has one column, {text.name}, which looks like several; write them "
            f"with commas, or learn each line as a text with --task {language}."
        )
    if others and classifies and not (usual and request.text_column):
        raise UsageError(
            f"{request.name} has texts in {text.name}, and none of its other columns is clearly "
            f"the label: {', '.join(others)}; name one with --label-column, or learn the texts "
            f"alone with --task {language}."
        )
    return TableColumns.of(language, text=text)


def classifier_columns(table: Table) -> TableColumns | None:
    """The columns that a classifier uses, or a regression, by the values of the label.

    None if no task has labels. Raises UsageError also if it is not clear which columns to use.
    """
    if not {*OF_ROWS} & {*table.request.tasks}:
        return None
    name, image, texts = table.request.name, table.image_option, table.text_options
    labels = table.label_options
    if image is None and not texts:
        image = table.image(labels)
        texts = table.texts(labels, image)
        if image is not None and texts:
            raise UsageError(
                f"{name} has images in column {image.name} and text in "
                f"{' and '.join(text.name for text in texts)}, of {table.listed}; choose with "
                "--image-column or --text-column."
            )
    inputs = [column for column in (image, *texts) if column]
    if not inputs:
        raise UsageError(
            f"none of the columns of {name} is clearly an image or a text: {table.listed}; "
            "name one with --image-column or --text-column."
        )
    labels = labels or _labels(table, inputs)
    if twice := [column.name for column in inputs if column in labels]:
        raise UsageError(
            f"column {min(twice)} of {name} cannot be used twice; name others of {table.listed}."
        )
    task = _task_of(table, labels)
    roles: dict[str, Column | None] = {ROLES[task]: labels[0]}
    if len(labels) > 1:
        roles = {f"{FLAG}{number}": column for number, column in enumerate(labels)}
    return TableColumns.of(task, image=image, **_text_roles(texts), **roles)


def _labels(table: Table, inputs: Sequence[Column]) -> tuple[Column, ...]:
    """The column of labels, or for multi-label without lists the columns of 0 and 1."""
    request, candidates = table.request, table.labels(inputs)
    flags = [column for column in table.free(inputs) if column.has_flags]
    if request.task == "multi-label" and not any(column.has_lists() for column in candidates):
        if len(flags) > 1:
            return tuple(flags)
        raise UsageError(
            f"{request.name} has no lists of labels, and no columns of 0 and 1 for each: "
            f"{table.listed}; name some with --label-column a,b."
        )
    several = len(candidates) > 1 and {*candidates} <= {*flags}
    if several and "multi-label" in request.tasks:
        raise UsageError(
            f"{request.name} has several columns that may be the label, "
            f"{', '.join(column.name for column in candidates)}, of {table.listed}; choose with "
            "--label-column, or take all with --task multi-label."
        )
    label = table.only(candidates, "label", "label-column")
    if label is None:
        raise UsageError(
            f"none of the columns of {request.name} is clearly the label: {table.listed}; name one "
            "with --label-column."
        )
    return (label,)


def _task_of(table: Table, labels: Sequence[Column]) -> Task:
    """The task with a label for each row: the job's, or else by the values of the labels."""
    request, label, several = table.request, labels[0], len(labels) > 1
    tasks, lists = request.tasks, label.has_lists()
    if request.task == "multi-label" and not several and not lists:
        raise UsageError(
            f"column {label.name} of {request.name} has no lists of labels; name a column that "
            'has, such as ["a", "b"], or a column of 0 and 1 for each label with '
            "--label-column a,b."
        )
    if "multi-label" in tasks and (several or (not request.task and lists)):
        return "multi-label"
    if several:
        raise UsageError(
            f"{request.name} has one column of labels for {tasks[0]}, not "
            f"{', '.join(column.name for column in labels)}; name one with --label-column."
        )
    decimals = "regression" in tasks and label.has_decimals
    if not request.task and (decimals or table.may_be_score(label)):
        return "regression"
    return next((task for task in tasks if task in OF_ROWS), "classification")


def unlabeled_columns(request: DataRequest, columns: Columns, modality: Modality) -> TableColumns:
    """The columns of inputs alone, for a model of this modality; a language model takes one.

    Raises UsageError also if it is not clear which columns to use.
    """
    table = Table.for_run(request, columns)
    request, image, texts = table.request, table.image_option, table.text_options
    labels = parts_of(request.label_column, table.columns)
    taken = [column for name, column in table.columns.items() if name in labels]
    if modality == "image":
        if image is None and request.task == "segmentation":
            both = _image_and_mask(table)
            image = None if both is None else table.columns[dict(both.roles)["image"]]
        image = image or table.image(taken)
    elif request.task == "causal-lm" and (chat := conversations.columns_of(table, answered=False)):
        return chat
    elif request.task == "token-classification" and (tokens := tokens_of(table)):
        return TableColumns.of(tokens=tokens)
    elif request.task in (*LANGUAGE, "embedding"):
        text = single_text(table)
        if text is None and request.embeds == "image":
            text = table.first(captions.NAMES)
        texts = () if text is None else (text,)
    else:
        texts = texts or table.texts(taken)
    if image is None and not texts:
        raise UsageError(
            f"none of the columns of {request.name} clearly holds {modality}s: {table.listed}; "
            f"name one with --{modality}-column."
        )
    return TableColumns.of(image=image, **_text_roles(texts))


# In this order; each finds the columns of its tasks, or None.
FINDERS: Sequence[Callable[[Table], TableColumns | None]] = (
    captions.columns_of,
    pairs.columns_of,
    conversations.columns_of,
    _tokens_and_tags,
    _image_and_mask,
    box_columns.columns_of,
    _text_alone,
    classifier_columns,
)


def _text_roles(texts: Iterable[Column]) -> dict[str, Column]:
    return dict(zip(TEXT_COLUMNS, texts, strict=False))


def _refuse_misread(table: Table, columns: TableColumns) -> None:
    """Raises UsageError for a header in the first row, and labels of as many words as texts."""
    name = table.request.name
    label, text = (table.columns.get(columns.get(role) or "") for role in ("label", "text"))
    if text is not None and normalized(str(*text.values[:1])) in LABELS | TEXTS:
        raise UsageError(f"row 1 of {name} looks like its header; delete what is above it.")
    if label is None or text is None or table.request.task is not None:
        return
    tags, words = ([len(str(value).split()) for value in each.values] for each in (label, text))
    if tags == words and len({*tags}) > 1 and 2 * tags.count(1) < len(tags):
        raise UsageError(
            f"{name} has tags of words in {label.name}; write lists, or give --task classification."
        )


def _number_notes(table: Table, columns: TableColumns) -> tuple[str, ...]:
    """A note on numbers that become classes, unless they are 0, 1, 2 and so on."""
    label, request = table.columns.get(columns.get("label") or ""), table.request
    if label is None or request.task is not None or "regression" not in request.tasks:
        return ()
    numbers = {*label.numbers}
    numbered = label.key in LABELS and numbers == {*range(len(numbers))}
    if len(numbers) < 3 or numbered or label.holds == "classes":
        return ()
    return (
        f"whole numbers in {label.name} are learned as {units.count(len(numbers), 'class')}; "
        "--task regression learns them as numbers.",
    )


def unserved(request: DataRequest, more: str = "") -> UsageError:
    """The error for data that serve none of the tasks. more: words on the columns of a table."""
    name, task = request.name, request.tasks[0]
    if "segmentation" in request.tasks:
        return UsageError(
            f"{name} has no images with masks, which segmentation learns from{more}; give folders "
            "images and masks, or a table with --image-column and the masks in --label-column."
        )
    if task == "detection":
        return UsageError(
            f"{name} has no images with boxes, which detection learns from{more}; give a folder of "
            "COCO, YOLO or Pascal VOC, or a table with an image and a column objects on each row."
        )
    lack, mend = "no single column or files of texts", "TXT files, or a table with --text-column"
    if task == "token-classification":
        lack = "no lists of tokens with a tag each"
        mend = "a CoNLL file, or a table with --text-column and --label-column"
    elif task in OF_ROWS:
        lack, mend = "no label for each row", "a table with --label-column"
    return UsageError(f"{name} has {lack}, which {task} learns from{more}; give {mend}.")


def for_other_models(request: DataRequest, what: str, task: Task, override: str) -> UsageError:
    """The error for data of a task that the model is not for; names the models that are.

    Args:
        request: for the data.
        what: the data, in words.
        task: the task that they are for.
        override: the option that chooses another task or other columns.
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
