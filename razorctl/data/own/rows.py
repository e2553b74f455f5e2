"""What is wrong with rows, as far as it is known without reading images."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from razorctl import units
from razorctl.data.own.fields import FIELDS
from razorctl.data.own.labels import Numbers
from razorctl.data.own.raw import Faults, Raw
from razorctl.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


def faults(raw: Raw, numbers: Numbers, answered: bool = True) -> dict[str, dict[int, str]]:
    """The bad rows of each split, as `check` finds them."""
    return {split: check(rows.data, numbers[split], answered) for split, rows in raw.splits.items()}


def check(
    rows: "pa.Table", numbers: "np.ndarray[Any, Any]", answered: bool = True
) -> dict[int, str]:
    """The bad rows: those with a fault, without a label, or with an empty text or message.

    rows: with the columns of `Raw`. numbers: of their classes, -1 is no label. answered: as of
    `chats.faults`.
    """
    found: dict[int, str] = {}
    if "fault" in rows.column_names:
        column = rows.column("fault")
        found |= {row: column[row].as_py() for row in _where(column.is_valid().to_numpy())}
    for name in [name for name in FIELDS if name in rows.column_names]:
        for row, reason in FIELDS[name].faults(rows.column(name), answered).items():
            found.setdefault(row, reason)
    for row in _where(numbers < 0):
        found.setdefault(row, "no label")
    return dict(sorted(found.items()))


def _where(mask: "np.ndarray[Any, Any]") -> list[int]:
    rows: list[int] = mask.nonzero()[0].tolist()
    return rows


def good(numbers: Numbers, found: Faults) -> dict[str, "np.ndarray[Any, Any]"]:
    """Split -> the rows that are not bad."""
    import numpy as np

    return {
        split: np.setdiff1d(np.arange(len(of)), list(found.get(split, ())))
        for split, of in numbers.items()
    }


def empty(name: str, split: str) -> DataError:
    """The error for a split without rows."""
    return DataError(f"{name} has no rows in its {split} split; add some, or leave the split out.")


def sound(
    raw: Raw,
    classes: tuple[str, ...],
    numbers: Numbers,
    kept: Mapping[str, "np.ndarray[Any, Any]"],
) -> None:
    """Raises DataError if the good rows cannot be trained on and evaluated.

    That is if a split is empty, and for a classifier if all training rows are of one class or each
    is of its own, or if another split has a class without training rows.
    """
    import numpy as np

    for split in raw.splits:
        if not len(kept[split]):
            raise empty(raw.name, split)
    if raw.task != "classification":
        return
    trained = np.unique(numbers["train"][kept["train"]])
    if len(trained) < 2:
        raise DataError(
            f"all training rows of {raw.name} are of one class, {classes[trained[0]]}; a "
            "classifier needs two or more."
        )
    if raw.modality == "text" and 2 < len(kept["train"]) == len(trained):
        raise DataError(
            f"each training row of {raw.name} has a label of its own; choose another column with "
            "--label-column."
        )
    for split in raw.splits:
        unknown = np.setdiff1d(numbers[split][kept[split]], trained)
        if len(unknown):
            few = ", ".join(classes[number] for number in unknown[:5])
            raise DataError(
                f"the {split} split of {raw.name} has {units.count(len(unknown), 'class')} that no "
                f"training row has, such as {few}; give all splits the same classes."
            )
