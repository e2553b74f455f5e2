"""Data sets by name.

Every module of this package is imported and defines `DATASETS`, a tuple of `Source` entries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from razorctl import models
from razorctl.config import registry
from razorctl.errors import UsageError
from razorctl.job import Job

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Splits:
    """Train and test rows, and the class names.

    A row has a `label`, which is an index into `classes`, and an `image`, or a `text` and
    sometimes a `text_pair`.
    """

    train: "Dataset"
    test: "Dataset"
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A data set by name, with what is known before it is loaded.

    load: returns the splits. Raises MissingError if the files cannot be found, and DataError if
        they cannot be read.
    """

    name: str
    summary: str
    modality: models.Modality
    classes: int
    train_examples: int
    test_examples: int
    load: Callable[[], Splits]


DATASETS: dict[str, Source] = {
    source.name: source for file in registry.modules(__name__, __path__) for source in file.DATASETS
}


def find(name: str) -> Source:
    """The data set of that name; raises UsageError, with the nearest name, if there is none."""
    return registry.find("data set", name, DATASETS)


def usual(model: str) -> str:
    """The name of the data set that a model is planned for if none is given."""
    return {"image": "cifar100", "text": "rte"}[models.find(model).modality]


def pair(model: str, dataset: str) -> tuple[models.Model, Source]:
    """The model and the data set of those names.

    Raises UsageError for an unknown name, and if the model cannot take the data set.
    """
    family, source = models.find(model), find(dataset)
    if family.modality != source.modality:
        fitting = [s.name for s in DATASETS.values() if s.modality == family.modality]
        raise UsageError(
            f"{model} takes {family.modality}s, and {dataset} has {source.modality}s; choose one "
            f"of {', '.join(fitting)}."
        )
    return family, source


def check(job: Job) -> None:
    """Raises UsageError for every mistake in a job that can be found before loading anything."""
    family, source = pair(job.model, job.dataset)
    job.resolved(family.defaults, source.train_examples)
