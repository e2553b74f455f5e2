"""Data sets by name: a file a source, found by listing.

A data file defines `DATASETS`, a tuple of `Source` entries.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from razorctl.errors import unknown

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


def _discover() -> dict[str, Source]:
    files = [
        importlib.import_module(f"{__name__}.{f.name}") for f in pkgutil.iter_modules(__path__)
    ]
    return {source.name: source for file in files for source in file.DATASETS}


DATASETS = _discover()


def find(name: str) -> Source:
    """The data set of that name; raises UsageError with the nearest one if there is none."""
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS)
    return DATASETS[name]
