"""The task that data are for: the one that is given, or the first that they serve."""

from collections.abc import Sequence
from pathlib import Path

from razorctl import models
from razorctl.data.own import columns, recognition
from razorctl.data.own.columns import Columns, Sample
from razorctl.errors import UsageError
from razorctl.job import LANGUAGE, Job, Task


def wanted(job: Job) -> Sequence[Task]:
    """The tasks that data may be for: the given one, or those of the model, its most usual first.

    Of a model that is not known, which is said when it is looked up, it is classification.
    """
    if job.task is not None:
        return (job.task,)  # type: ignore[return-value]
    try:
        return models.named(job.model).tasks
    except UsageError:
        return ("classification",)


def language(job: Job) -> Task | None:
    """The first of the wanted tasks that models language; None if there is none."""
    return next((task for task in wanted(job) if task in LANGUAGE), None)


def detect(name: str, sample: Sample, job: Job, root: Path | None = None) -> Columns:
    """The task that a table is for, and the columns that it uses.

    A given task settles it. Otherwise conversations are for causal-lm, images with masks for
    segmentation, what has a label for classification, and texts alone for the first task of the
    model that models language, as far as the model is for these. If that is its most usual task,
    only a column that is a label by name or type counts as one.
    root: as in `columns.detect`. Raises what that raises, and UsageError if the table does not
    serve the given task or is of one of `recognition.KINDS`.
    """
    tasks = wanted(job)
    recognition.refuse(name, sample, job, tasks[0], root)
    if job.text_column is None and job.label_column is None:
        messages = columns.conversations(sample)
        if messages is not None and "causal-lm" in tasks:
            return Columns("", task="causal-lm", messages=messages)
        if messages is not None:
            override = "name a column of texts with --text-column"
            raise recognition.of_others(name, "conversations", "causal-lm", job, override)
    if "segmentation" in tasks or job.label_column is None:
        image, mask = columns.masked(name, sample, job, root)
        if image is not None and mask is not None:
            if "segmentation" in tasks:
                return Columns("", image, task="segmentation", mask=mask)
            override = "name the column of classes with --label-column"
            raise recognition.of_others(name, "images with masks", "segmentation", job, override)
    lm = language(job)
    if lm is not None:
        text = columns.text(name, sample, job)
        named = tasks[0] == lm
        classes = "classification" in tasks
        if text is not None and not (classes and columns.labels(sample, [text], job, named=named)):
            if job.label_column is not None:
                raise UsageError(f"{lm} learns from texts alone; leave --label-column out.")
            return Columns("", texts=(text,), task=lm)
    if "classification" not in tasks:
        raise unserved(name, tasks, f", only the columns {', '.join(sample.values)}")
    return columns.detect(name, sample, job, root)


def unserved(name: str, tasks: Sequence[Task], more: str = "") -> UsageError:
    """The error for data that serve none of the tasks; more: what they have instead."""
    if "segmentation" in tasks:
        return UsageError(
            f"{name} has no images with masks, which segmentation learns from{more}; give folders "
            "images and masks, or a table with --image-column and the masks in --label-column."
        )
    return UsageError(
        f"{name} has no single column or files of texts, which {tasks[0]} learns from{more}; give "
        "TXT files, or a table with --text-column."
    )
