"""Labels of rows as a task learns them: an entry of READERS for each task that has labels."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from razorctl.data.own.labels import Numbers, class_numbers, renumbered
from razorctl.data.own.raw import Faults, Raw
from razorctl.errors import DataError
from razorctl.tasks import Task

if TYPE_CHECKING:
    import numpy as np

LARGE = 100  # labels of a regression beyond which a note says that smaller ones are learned sooner


@dataclass(frozen=True)
class Targets:
    """The labels of all rows.

    Args:
        classes: the names of the classes, or of the number that a regression learns.
        numbers: split -> the number of each row's class, by which rows are held out; 0 of other
            tasks, and -1 without a label.
        labels: split -> the `label` of each row, as `Splits` has it; empty of tasks without.
        faults: the rows whose labels cannot be used, beside those without one.
    """

    classes: tuple[str, ...]
    numbers: Numbers
    labels: Mapping[str, Any] = field(default_factory=dict)
    faults: Faults = field(default_factory=dict)


def of(raw: Raw) -> Targets:
    """The labels of rows; raises DataError for labels that their task cannot use."""
    return READERS[raw.task](raw) if raw.task in READERS else Targets(*class_numbers(raw))


def of_run(
    raw: Raw, targets: Targets, classes: Sequence[str], good: Mapping[str, "np.ndarray[Any, Any]"]
) -> Targets:
    """The labels of rows by the classes of a run.

    good: as of `check`. Raises DataError for labels of these rows that are no classes of the run.
    """
    if raw.task != "classification":
        return replace(targets, classes=tuple(classes))
    numbers = {
        split: renumbered(raw.name, own, targets.classes, classes, good[split])
        for split, own in targets.numbers.items()
    }
    return Targets(tuple(classes), numbers, numbers)


def check(raw: Raw, targets: Targets, good: Mapping[str, "np.ndarray[Any, Any]"]) -> None:
    """Raises DataError for a regression whose training rows have one label.

    good: split -> the numbers of its good rows.
    """
    if raw.task == "regression":
        values = targets.labels["train"][good["train"]]
        if values.min() == values.max():
            raise DataError(
                f"all training rows of {raw.name} have the label {values[0]:g}; a regression needs "
                "two or more."
            )


def notes(raw: Raw, targets: Targets, good: Mapping[str, "np.ndarray[Any, Any]"]) -> list[str]:
    """Notes on labels of rows that are trained on; good: as of `check`."""
    if raw.task != "regression":
        return []
    values = targets.labels["train"][good["train"]]
    if abs(values).max() <= LARGE:
        return []
    return [
        f"labels are between {values.min():,g} and {values.max():,g}, and a model begins near 0; "
        "in a larger unit, so that they are about 1, they are learned in fewer steps."
    ]


def _classes(raw: Raw) -> Targets:
    names, numbers = class_numbers(raw)
    return Targets(names, numbers, numbers)


def _numbers(raw: Raw) -> Targets:
    values = {
        split: rows.data.column("number").to_numpy().astype("float64")
        for split, rows in raw.splits.items()
    }
    names, numbers = class_numbers(raw)
    return Targets(names, numbers, values)


READERS: Mapping[Task, Callable[[Raw], Targets]] = {
    "classification": _classes,
    "regression": _numbers,
}
