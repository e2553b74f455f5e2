"""Bad rows, as far as they are known without reading images; notes on good ones."""

from collections.abc import Mapping, Sequence
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
    `Field.faults`.
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


def check_enough(
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


Rows = Mapping[str, "np.ndarray[Any, Any]"]  # split -> the numbers of its rows, as they are stored


def notes(
    raw: Raw,
    classes: Sequence[str],
    numbers: Numbers,
    parts: Mapping[str, tuple[str, Any]],
    held: Rows,
) -> tuple[str, ...]:
    """Notes on rows that are trained and evaluated on.

    parts: `train`, `validation` and `test` -> the split of `raw` that their rows are of, and the
    numbers of these rows. held: split of `raw` -> the contents of all its rows.
    """
    found = [*raw.notes, *_alike(classes), *_shared(raw, parts, held)]
    return (*found, *(_labels(raw, classes, numbers, parts, held) if classes else ()))


def _alike(classes: Sequence[str]) -> list[str]:
    """A note on classes that differ in case or space alone."""
    plain: dict[str, list[str]] = {}
    for name in classes:
        plain.setdefault("".join(name.casefold().split()), []).append(name)
    alike = [names for names in plain.values() if len(names) > 1]
    if not alike:
        return []
    few = " and ".join(map(repr, alike[0]))
    return [f"the classes {few} differ in case or space alone{_more(len(alike))}."]


def _shared(raw: Raw, parts: Mapping[str, tuple[str, Any]], held: Rows) -> list[str]:
    """A note for each split with rows that are trained on as well."""
    import numpy as np

    own, trained = parts["train"]
    found = []
    for part in parts.keys() - {"train"}:
        split, kept = parts[part]
        same = kept[np.isin(held[split][kept], held[own][trained])]
        if len(same):
            rows = units.count(len(same), "row")
            verb = "is" if len(same) == 1 else "are"
            where = raw.place(split, same[0])
            found.append(f"{rows} for {part} {verb} trained on as well, such as {where}.")
    return sorted(found)


def _labels(
    raw: Raw,
    classes: Sequence[str],
    numbers: Numbers,
    parts: Mapping[str, tuple[str, Any]],
    held: Rows,
) -> list[str]:
    """A note on rows of one content with several labels."""
    import numpy as np

    splits = [split for split, kept in parts.values() for _ in kept]
    kept = np.concatenate([kept for _, kept in parts.values()])
    content = np.concatenate([held[split][own] for split, own in parts.values()])
    label = np.concatenate([numbers[split][own] for split, own in parts.values()])
    order = np.lexsort((label, content))
    same = content[order][1:] == content[order][:-1]
    at = np.flatnonzero(same & (label[order][1:] != label[order][:-1]))
    if not len(at):
        return []
    one, other = order[at[0]], order[at[0] + 1]
    what = "image" if raw.modality == "image" else "text"
    named = " and ".join(
        f"{raw.place(splits[row], kept[row])} ({classes[label[row]]})" for row in (one, other)
    )
    return [f"the same {what} has two labels: {named}{_more(len(np.unique(content[order][at])))}."]


def _more(count: int) -> str:
    return f", and {count - 1:,} more" if count > 1 else ""
