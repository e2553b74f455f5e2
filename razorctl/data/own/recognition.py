"""The task that data are for, by the columns of a table; what the model is not for is refused."""

from razorctl import models
from razorctl.data.own import columns
from razorctl.data.own.ask import Ask
from razorctl.data.own.columns import Columns, Sample
from razorctl.data.own.unsupported import refuse
from razorctl.errors import UsageError
from razorctl.tasks import Task


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
