"""The description of a data set, which needs no rows, and its splits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from razorctl.config.tasks import Task
from razorctl.models import Modality

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Splits:
    """The rows of each split, and the class names; there is a validation or a test split.

    The columns of a row depend on the task:
    - classification: an `image`, or a `text` and sometimes a `text_pair`; `label`, an index into
      `classes`. Regression: the label is a number, and `classes` its name. Multi-label: the label
      is a list with 0 or 1 for each class.
    - embedding: a `text`, a `text_pair`, and `negative.0` and so on; `classes` has their names in
      the data. If the label is a score of the pair, it has the name of the score alone. Or an
      `image`, its caption as `text`, and `image_id`, a number of the content of the image.
    - token-classification: `tokens`; the label is a list with the number of each tag.
    - segmentation: an `image` and a `mask` of the same size, with values as in `models.masks`;
      sometimes `mask_classes` as there.
    - detection: an `image` and its `boxes`, a list of [left, top, right, bottom] in pixels of the
      upright image, fp64; the label is a list with the class of each box. Sometimes `crowd`, a list
      with 1 for each box that evaluation ignores, and 0 for others. The lists may be empty.
    - language models: a `text`, or `messages` as in `own.chats`; no classes.

    Images may have a `white`, the level of white in their set, as in `models.images`.

    Args:
        train: the rows that are trained on.
        validation: the rows that are evaluated during training; None is `test`.
        test: the rows that are evaluated at the end.
        classes: the names of the classes.
        skipped: a line for each bad row that is left out.
        record: the rows that are held out and skipped, as a JSON value from which the splits can be
            repeated; None if all rows are used.
        digests: split -> the digest of its rows, by `own.contents`; None before it is computed.
        white: the `white` of the rows, if they have one.
        mask_classes: the `mask_classes` that the values of the training masks gave; "" if rows have
            none, or if the job names them.
        box_format: the format of boxes by the sizes of images; "" if files or the job say it.
        notes: sentences on what a user may not have meant.
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
    box_format: str = ""
    notes: Sequence[str] = ()

    @property
    def parts(self) -> dict[str, "Dataset"]:
        """The rows of each split."""
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
    """The description of a data set, and the function that loads it.

    Numbers of rows are None for texts that become blocks of tokens when they are loaded.

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
        metric: the figure that it is judged by; None is the task's usual one.
        validated: whether a user's data have a validation split, held out or not.
        evaluated_examples: rows of a user's data that are evaluated during training.
        conversations: whether its rows have `messages`.
        repository: its repository on the hub; None for others.
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
