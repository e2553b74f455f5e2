"""The task that a table is for, by its columns."""

import re
from dataclasses import replace

from razorctl import models, units
from razorctl.config.tasks import OF_ROWS, Task
from razorctl.data.own.read import conversations
from razorctl.data.own.read.refused import ONE_TEXT, refuse_table
from razorctl.data.own.read.sample import normalized_name
from razorctl.data.own.read.table import LABELS, TEXTS, Table
from razorctl.data.own.read.table_columns import TableColumns
from razorctl.data.own.request import DataRequest
from razorctl.errors import UsageError

JOINED = re.compile(r"\w+((\s*[,;:|^~]+\s*|\s{2,})\w+)+")  # a column that may be several


def table_columns(table: Table) -> TableColumns:
    """The task that a table is for, and the columns that it uses.

    A given task settles it. Otherwise conversations are for causal-lm, images with masks for
    segmentation, what has labels for classification, regression or multi-label, and texts alone for
    the first task of the model that models language, as far as the model is for these. If that is
    its most usual task, only a column that is a label by name or type counts as one.
    Raises what `Table` raises, and UsageError if the table does not serve the given task or is of a
    kind that no model is for.
    """
    refuse_table(table)
    columns = _columns_of(table)
    _refuse_misread(table, columns)
    unused = tuple(c for c in table.sample.values if c not in columns.renamed)
    return replace(columns, unused=unused, notes=_number_notes(table, columns))


def _columns_of(table: Table) -> TableColumns:
    request, tasks = table.request, table.request.tasks
    chat = None if table.clear else conversations.columns_of(table)
    if chat is not None:
        if "causal-lm" in tasks:
            return chat
        what = "conversations" if chat.get("messages") else "prompts and answers"
        raise for_other_models(request, what, "causal-lm", ONE_TEXT)
    others = f", only the columns {', '.join(table.sample.values)}"
    tokens, tags = table.tokens_and_tags()
    if tokens is not None and tags is not None:
        if "token-classification" in tasks:
            return TableColumns.of("token-classification", tokens=tokens, tags=tags)
        what = "tokens with a tag each"
        raise for_other_models(request, what, "token-classification", ONE_TEXT)
    if request.task == "token-classification":
        raise unserved(request, others)
    if "segmentation" in tasks or request.label_column is None:
        image, mask = table.image_and_mask()
        if image is not None and mask is not None:
            if "segmentation" in tasks:
                return TableColumns.of("segmentation", image=image, mask=mask)
            override = "name the column of classes with --label-column"
            raise for_other_models(request, "images with masks", "segmentation", override)
    text = None if request.language is None else table.single_text()
    if text is not None and (alone := _text_alone(table, text)) is not None:
        return alone
    if not {*OF_ROWS} & {*tasks}:
        raise unserved(request, others)
    return table.classifier_columns()


def _text_alone(table: Table, text: str) -> TableColumns | None:
    """The column of texts that a language model learns; None if others may be labels.

    Raises UsageError for a table with more columns of which none is clearly the label, unless the
    task or, for a language model, the text is given.
    """
    request = table.request
    name, language, classifies = request.name, request.language, bool({*OF_ROWS} & {*request.tasks})
    usual = request.tasks[0] == language
    if classifies and table.label_candidates([text], by_name=usual):
        return None
    assert language is not None
    if request.label_column is not None:
        raise UsageError(f"{language} learns from texts alone; leave --label-column out.")
    others = [column for column in table.sample.values if column != text]
    if not (others or request.task or request.text_column) and JOINED.fullmatch(text):
        raise UsageError(
            f"{name} has one column, {text}, which looks like several; write them with commas, or "
            f"learn each line as a text with --task {language}."
        )
    if others and classifies and not (usual and request.text_column):
        raise UsageError(
            f"{name} has texts in {text}, and none of its other columns is clearly the label: "
            f"{', '.join(others)}; name one with --label-column, or learn the texts alone with "
            f"--task {language}."
        )
    return TableColumns.of(language, text=text)


def _refuse_misread(table: Table, columns: TableColumns) -> None:
    """Raises UsageError for a header in the first row, and labels of as many words as texts."""
    name, values = table.request.name, table.sample.values
    label, text = columns.get("label"), columns.get("text")
    if text and normalized_name(str(*values[text][:1])) in LABELS | TEXTS:
        raise UsageError(f"row 1 of {name} looks like its header; delete what is above it.")
    if label is None or text is None or table.request.task is not None:
        return
    tags, words = ([len(str(value).split()) for value in values[c]] for c in (label, text))
    if tags == words and len({*tags}) > 1 and 2 * tags.count(1) < len(tags):
        raise UsageError(
            f"{name} has tags of words in {label}; write lists, or give --task classification."
        )


def _number_notes(table: Table, columns: TableColumns) -> tuple[str, ...]:
    """A note on numbers that are taken as classes, unless they only number these: 0, 1, 2."""
    label, request = columns.get("label"), table.request
    if label is None or request.task is not None or "regression" not in request.tasks:
        return ()
    numbers = {*table.sample.numbers(label)}
    numbered = normalized_name(label) in LABELS and numbers == {*range(len(numbers))}
    if len(numbers) < 3 or numbered or label in table.sample.classes:
        return ()
    return (
        f"whole numbers in {label} are learned as {units.count(len(numbers), 'class')}; --task "
        "regression learns them as numbers.",
    )


def unserved(request: DataRequest, more: str = "") -> UsageError:
    """The error for data that serve none of the tasks.

    more: the columns that they have instead, as a part of the sentence.
    """
    name, task = request.name, request.tasks[0]
    if "segmentation" in request.tasks:
        return UsageError(
            f"{name} has no images with masks, which segmentation learns from{more}; give folders "
            "images and masks, or a table with --image-column and the masks in --label-column."
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
        request: what is asked of the data.
        what: the data, in words.
        task: the task that they are for.
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
