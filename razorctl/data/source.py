"""A data set, with what is known before it is loaded, and its splits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from razorctl.config.tasks import Task
from razorctl.models import Modality

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Splits:
    """The rows of each split, and the class names; a validation or a test split is there.

    A row for classification has a `label`, which is an index into `classes`, and an `image`, or a
    `text` and sometimes a `text_pair`. For regression the label is a number, and `classes` its
    name; for multi-label it is a list of 0 or 1 for each class. For token-classification rows have
    `tokens`, and the label is a list of the number of each tag. One for segmentation has an `image`
    and a `mask` of the same size, whose values `models.masks` says, and may have `mask_classes` as
    there. Images may have a `white`, the level of white in their set as `models.images` has it.
    One for language modelling has a `text`, or `messages`, as `own.chats` has them; it has no
    classes.

    Args:
        train: the rows that are trained on.
        validation: the rows that are evaluated during training; None is `test`.
        test: the rows that are evaluated at the end.
        classes: the names of the classes.
        skipped: a line for each bad row that is left out.
        record: the rows that are held out and skipped, a JSON value from which the splits can be
            repeated; None if all rows are used as they are.
        digests: split -> the digest of its rows, as of `own.contents`; None before it is known.
        white: the `white` of the rows, if they have one.
        mask_classes: the `mask_classes` of the rows, by the values of the training masks; "" if
            they have none, or a job has said them.
        notes: a sentence on each thing that a user may not have meant.
    """

    train: "Dataset"
    validation: "Dataset | None"
    test: "Dataset | None"
    classes: tuple[str, ...]
    skipped: Sequence[str] = ()
    record: Mapping[str, Any] | None = None
    digests: Mapping[str, str] | None = None
    white: int | None = None
    mask_classes: str = ""
    notes: Sequence[str] = ()

    @property
    def parts(self) -> dict[str, "Dataset"]:
        """The rows of each split that is there."""
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        return {split: rows for split, rows in parts.items() if rows is not None}

    @property
    def evaluated(self) -> tuple[str, "Dataset"]:
        """The name and the rows of the split that is evaluated during training."""
        if self.validation is not None:
            return "validation", self.validation
        assert self.test is not None
        return "test", self.test


@dataclass(frozen=True)
class Source:
    """A data set, with what is known before it is loaded.

    Numbers of rows are None if they are not known before texts become blocks of tokens.

    Args:
        name: the name of the data set.
        summary: a line on it.
        modality: images or texts.
        classes: the number of classes.
        train_examples: rows that are trained on.
        test_examples: rows that are evaluated at the end.
        load: returns the splits; it may be given a `Progress`. Raises MissingError if the files
            cannot be found, and DataError if they cannot be read.
        details: lines on what was detected.
        metric: the figure that it is judged by; None is the usual one of the task.
        task: the task that it is for.
        validated: whether a user's data have a validation split.
        evaluated_examples: rows of a user's data that are evaluated during training.
        conversations: whether its rows have `messages`.
        repository: the repository of the hub which has it.
    """

    name: str
    summary: str
    modality: Modality
    classes: int
    train_examples: int | None
    test_examples: int | None
    load: Callable[..., Splits]
    details: tuple[str, ...] = ()
    metric: str | None = None
    task: Task = "classification"
    validated: bool = False
    evaluated_examples: int | None = None
    conversations: bool = False
    repository: str | None = None
