"""A data set, with what is known before it is loaded, and its splits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from razorctl.models import Modality
from razorctl.tasks import Task

if TYPE_CHECKING:
    from datasets import Dataset

    from razorctl.data.own.stream import Stream


@dataclass(frozen=True)
class Splits:
    """The rows of each split, and the class names; a validation or a test split is there.

    Splits are data sets, or all are streams if the job says so.

    A row for classification has a `label`, which is an index into `classes`, and an `image`, or a
    `text` and sometimes a `text_pair`. One for segmentation has an `image` and a `mask` of the same
    size, whose values `models.masks` says, and may have a `first` as there. Images may have a
    `white`, the level of white in their set as `models.images` has it. One for language modelling
    has a `text`, or `messages`, each with a `role` and a `content`; it has no classes.

    skipped: a line for each bad row that is left out; of streams, as they are read. record: what
    was held out and skipped, a JSON value from which the splits can be repeated; None if all rows
    are used as they are, or streamed. digests: split -> that of its rows, as `own.contents` has it;
    None before it is known, and of streams. white: that of the rows, if they have one. notes: what
    a user may not have meant, in sentences.
    """

    train: "Dataset | Stream"
    validation: "Dataset | Stream | None"
    test: "Dataset | Stream | None"
    classes: tuple[str, ...]
    skipped: Sequence[str] = ()
    record: Mapping[str, Any] | None = None
    digests: Mapping[str, str] | None = None
    white: int | None = None
    notes: Sequence[str] = ()

    @property
    def evaluated(self) -> tuple[str, "Dataset | Stream"]:
        """The name and the rows of the split that is evaluated during training."""
        if self.validation is not None:
            return "validation", self.validation
        assert self.test is not None
        return "test", self.test


@dataclass(frozen=True)
class Source:
    """A data set, with what is known before it is loaded.

    train_examples, test_examples: rows of the split that is trained on, and of the one that is
        evaluated at the end; None if they are not known before they are streamed, or before texts
        become blocks of tokens.
    load: returns the splits; it may be given a `Progress`. Raises MissingError if the files cannot
        be found, and DataError if they cannot be read.
    told: lines on what was detected.
    metric: the figure that it is judged by; None is the usual one of the task.
    task: what it is for.
    validated: whether it has a validation split. evaluated_examples: rows of the split that is
        evaluated during training, None if that is not known; both of one's own data alone.
    """

    name: str
    summary: str
    modality: Modality
    classes: int
    train_examples: int | None
    test_examples: int | None
    load: Callable[..., Splits]
    told: tuple[str, ...] = ()
    metric: str | None = None
    task: Task = "classification"
    validated: bool = False
    evaluated_examples: int | None = None
