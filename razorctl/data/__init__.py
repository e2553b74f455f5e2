"""Data sets by name: a file a source, found by listing.

A data file defines `DATASETS`, a tuple of `Source` entries.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from razorctl import registry

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Splits:
    """Train and test rows, and the names of the classes that their `label` column numbers."""

    train: "Dataset"
    test: "Dataset"
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """A data set by name."""

    name: str
    summary: str
    load: Callable[[], Splits]


DATASETS: dict[str, Source] = {
    source.name: source for file in registry.modules(__name__, __path__) for source in file.DATASETS
}


def find(name: str) -> Source:
    """The data set of that name; raises UsageError with the nearest one if there is none."""
    return registry.find("data set", name, DATASETS)
