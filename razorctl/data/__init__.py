"""Data sets by name: a file a source, found by listing.

A data file defines `DATASETS`, a tuple of `Source` entries.
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
    """Train and test rows, and the names of the classes that their `label` column numbers.

    Beside `label` a row has an `image`, or a `text` and perhaps a `text_pair`.
    """

    train: "Dataset"
    test: "Dataset"
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A data set by name, and what can be said of it before it is loaded.

    load: raises MissingError or DataError where the rows cannot be had or read.
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
    """The data set of that name; raises UsageError with the nearest one if there is none."""
    return registry.find("data set", name, DATASETS)


def usual(model: str) -> str:
    """The data set that a model is planned for where none is named."""
    return {"image": "cifar100", "text": "rte"}[models.find(model).modality]


def pair(model: str, dataset: str) -> tuple[models.Model, Source]:
    """The model and the data set of those names; raises UsageError if one cannot take the other."""
    family, source = models.find(model), find(dataset)
    if family.modality != source.modality:
        fitting = [s.name for s in DATASETS.values() if s.modality == family.modality]
        raise UsageError(
            f"{model} takes {family.modality}s, and {dataset} has {source.modality}s; data sets of "
            f"{family.modality}s: {', '.join(fitting)}."
        )
    return family, source


def check(job: Job) -> None:
    """Raises UsageError for what can be said against a job before anything is loaded."""
    family, source = pair(job.model, job.dataset)
    job.resolved(family.defaults, source.train_examples)
