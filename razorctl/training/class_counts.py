"""The training labels of each class: their number, their weights, and notes on rare classes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from razorctl import units
from razorctl.config.job import Job
from razorctl.config.job_checks import weight_numbers
from razorctl.errors import DataError
from razorctl.models import Progress
from razorctl.models.masks import mask_labels

if TYPE_CHECKING:
    import numpy as np

FEW = 10  # rows; a class with fewer gets a note
NAMED = 5  # most classes that a note names


def class_counts(
    rows: Any, classes: int, job: Job, progress: Progress
) -> "np.ndarray[Any, Any] | None":
    """The number of rows, or of pixels in masks, of each class [classes].

    None for tasks without classes; pixels are only counted for class weights.
    """
    import numpy as np

    if job.classifies:
        return np.bincount(np.asarray(rows["label"][:]), minlength=classes)
    if job.task != "segmentation" or job.class_weights is None:
        return None
    progress("counting the pixels of each class")
    counts, names = np.zeros(classes, np.int64), {"mask", "mask_classes"} & {*rows.column_names}
    for row in rows.select_columns(sorted(names)):
        labels = mask_labels(row["mask"], row.get("mask_classes", ""))
        counts += np.bincount(labels[labels >= 0], minlength=classes)
    return counts


def class_weights(
    counts: "np.ndarray[Any, Any] | None", classes: Sequence[str], job: Job
) -> Tensor | None:
    """The weights of labels by class [classes], fp32; their mean over labels is 1.

    None if all are the same. Raises DataError for a class without labels, which cannot be balanced.
    """
    if counts is None or job.class_weights is None:
        return None
    labels = torch.from_numpy(counts).double()
    numbers = weight_numbers(job.class_weights)
    if numbers is None:
        if empty := [name for name, count in zip(classes, counts, strict=True) if not count]:
            raise DataError(
                f"the training split of {job.dataset} has no label of {_named(empty)}, so classes "
                "cannot be balanced; add rows, or give --class-weights a number for each class."
            )
        weights = 1 / labels
    else:
        weights = torch.tensor(numbers, dtype=torch.float64)
    return (weights * labels.sum() / (weights * labels).sum()).float()


def rare_classes(
    counts: "np.ndarray[Any, Any] | None", classes: Sequence[str], job: Job
) -> list[str]:
    """A sentence on the classes with fewer than FEW rows, if there are any."""
    if counts is None or not job.classifies or not (rare := counts < FEW).any():
        return []
    few = [
        f"{name} ({units.count(count, 'row')})"
        for name, count in zip(classes, counts, strict=True)
        if count < FEW
    ]
    verb = "has" if len(few) == 1 else "have"
    mend = ""
    if not rare.all() and job.class_weights is None:
        mend = "; --class-weights balanced counts all classes alike, as --metric f1 does"
    return [
        f"{len(few):,} of {units.count(len(classes), 'class')} {verb} fewer than "
        f"{units.count(FEW, 'training row')}: {_named(few)}{mend}."
    ]


def _named(names: Sequence[str]) -> str:
    more = f", and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
