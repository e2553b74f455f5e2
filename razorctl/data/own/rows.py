"""Faults of rows that need no look at images, and notes on good rows."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from unicodedata import category, normalize

from razorctl import units
from razorctl.data.own.fields import field_of
from razorctl.data.own.labels import WHOLE, Numbers, is_missing, no_labels
from razorctl.data.own.raw import TEXT_COLUMNS, Faults, RawRows
from razorctl.data.own.request import DataRequest
from razorctl.data.own.targets import Good, Targets, flat
from razorctl.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from datasets import Dataset

Contents = Mapping[str, "np.ndarray[Any, Any]"]  # split -> the content of each row
# Split of `Splits` -> the split of `RawRows` with its rows, and the numbers of these there.
Parts = Mapping[str, tuple[str, "np.ndarray[Any, Any]"]]
LABELS = ("label", "number", "labels", "flag", "tags", "objects")  # columns of `RawRows`
WITHOUT = ", without {}, which has no labels"


def faults(raw: RawRows, answered: bool = True) -> dict[str, dict[int, str]]:
    """The faults of each split: faults of reading, and of `Field.faults` such as empty texts.

    answered: as in `Field.faults`.
    """
    every = {split: _table_faults(rows.data, answered) for split, rows in raw.splits.items()}
    if raw.task == "embedding":
        for split, rows in raw.splits.items():
            for row in _alike(rows.data):
                every[split].setdefault(row, "its two texts are the same")
    return every


def with_unlabeled(raw: RawRows, bad: Faults, targets: Targets) -> dict[str, dict[int, str]]:
    """The bad rows of each split, with rows without a label, and with faults of labels."""
    every = {}
    for split, numbers in targets.numbers.items():
        data, faults = raw.splits[split].data, {**targets.faults.get(split, {}), **bad[split]}
        for row in _where(numbers < 0):
            value = data.column("label")[row].as_py()
            faults.setdefault(row, "no label" if is_missing(value) else f"no label: {value}")
        every[split] = dict(sorted(faults.items()))
    return every


def _table_faults(rows: "pa.Table", answered: bool) -> dict[int, str]:
    faults: dict[int, str] = {}
    if "fault" in rows.column_names:
        column = rows.column("fault")
        faults |= {row: column[row].as_py() for row in _where(column.is_valid().to_numpy())}
    for name in rows.column_names:
        field = field_of(name)
        if field is not None:
            for row, reason in field.faults(rows.column(name), answered).items():
                faults.setdefault(row, reason)
    return dict(sorted(faults.items()))


def _alike(rows: "pa.Table") -> list[int]:
    """The rows of an embedding whose two texts are the same."""
    import pyarrow.compute as pc

    if "text_pair" not in rows.column_names:
        return []
    texts, others = (pc.utf8_trim_whitespace(rows.column(name)) for name in TEXT_COLUMNS)
    return _where(pc.fill_null(pc.equal(texts, others), False).to_numpy())


def _where(mask: "np.ndarray[Any, Any]") -> list[int]:
    rows: list[int] = mask.nonzero()[0].tolist()
    return rows


def good(numbers: Numbers, faults: Faults) -> Good:
    """Split -> the rows that are not bad."""
    import numpy as np

    return {
        split: np.setdiff1d(np.arange(len(of)), list(faults.get(split, ())))
        for split, of in numbers.items()
    }


def empty(name: str, split: str) -> DataError:
    """The error for a split without rows."""
    return DataError(f"{name} has no rows in its {split} split; add some, or leave the split out.")


def without_labels(rows: "Dataset") -> bool:
    """Whether there are columns of labels and rows, and no row has a label, as in contests."""
    columns = [rows.data.column(name) for name in rows.column_names if is_label(name)]
    return len(rows) > 0 and len(columns) > 0 and all(map(_has_none, columns))


def unlabeled_out(request: DataRequest, splits: dict[str, "Dataset"], names: dict[str, str]) -> str:
    """Deletes splits without labels from `splits`; the training split and named splits stay.

    Returns the end of a sentence on these. names: split -> its name in the data.
    """
    left = [split for split in splits if split != "train" and without_labels(splits[split])]
    words = ""
    for split in left if request.split is None else ():
        del splits[split]
        words += WITHOUT.format(names.pop(split))
    return words


def is_label(name: str) -> bool:
    """Whether a column of `RawRows` is of labels."""
    return name.partition(".")[0] in LABELS


def _has_none(labels: "pa.ChunkedArray") -> bool:
    """Whether a column has no label at all."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_nested(labels.type):
        return not pc.any(pc.greater(pc.list_value_length(labels), 0)).as_py()
    values = labels.unique().to_pylist()
    return len(no_labels(values)) == len(values)


def check_enough(raw: RawRows, targets: Targets, good: Good) -> None:
    """Raises DataError if the good rows cannot be trained on and evaluated.

    No split may be empty. The training rows of a classifier must have several classes, of which
    one has several rows. Training rows of a classifier and of detection must have all classes of
    the other splits; in detection they must have a box.
    """
    import numpy as np

    classes, numbers = targets.classes, targets.numbers

    for split in raw.splits:
        if not len(good[split]):
            raise empty(raw.name, split)
    if raw.task == "detection":
        used = {split: flat(targets.labels[split], of) for split, of in good.items()}
        if not len(used["train"]):
            raise DataError(f"no training image of {raw.name} has a box; give some.")
        _check_classes(raw, classes, used)
    if raw.task != "classification":
        return
    trained = np.unique(numbers["train"][good["train"]])
    if len(trained) < 2:
        raise DataError(
            f"all training rows of {raw.name} are of one class, {classes[trained[0]]}; a "
            "classifier needs two or more."
        )
    if raw.modality == "text" and len(trained) > 2 and len(trained) == len(good["train"]):
        numbers_too = all(WHOLE.fullmatch(classes[number]) for number in trained)
        mend = ", or learn numbers with --task regression" if numbers_too else ""
        raise DataError(
            f"each training row of {raw.name} has a label of its own; choose another column with "
            f"--label-column{mend}."
        )
    _check_classes(raw, classes, {split: numbers[split][of] for split, of in good.items()})


def _check_classes(raw: RawRows, classes: Sequence[str], used: Numbers) -> None:
    """Raises DataError if a split has classes that no training row has; used: by splits."""
    import numpy as np

    for split, numbers in used.items():
        untrained = np.setdiff1d(numbers, used["train"])
        if len(untrained):
            few = ", ".join(classes[number] for number in untrained[:5])
            count = units.count(len(untrained), "class")
            raise DataError(
                f"the {split} split of {raw.name} has {count} that no training row has, such "
                f"as {few}; give all splits the same classes."
            )


def notes(raw: RawRows, targets: Targets, parts: Parts, contents: Contents) -> Iterator[str]:
    """Notes on the rows of all parts. contents: of all rows."""
    yield from _alike_classes(targets.classes)
    if raw.task == "classification":
        yield from _joined_classes(targets.classes)
    yield from raw.notes
    yield from _shared_rows(raw, parts, contents)
    if targets.classes:
        yield from _several_labels(raw, targets, parts, contents)


def _alike_classes(classes: Sequence[str]) -> Iterator[str]:
    """A note on classes that differ only in case, space or similar signs."""
    by_letters: dict[str, list[str]] = {}
    for name in classes:
        by_letters.setdefault(_letters(name), []).append(name)
    alike = [names for names in by_letters.values() if len(names) > 1]
    if alike:
        few = " and ".join(map(repr, alike[0]))
        yield f"the classes {few} differ only in case, space or form{_more(len(alike))}."


def _letters(name: str) -> str:
    """A class name without case, spaces, invisible signs, leading zeros and quotes, one dash."""
    letters = "".join(normalize("NFKC", name).casefold().split())
    seen = "".join("-" if category(c) == "Pd" else c for c in letters if category(c) != "Cf")
    return (seen.lstrip("0") if seen.isdecimal() else seen.strip("'\"")) or seen


def _joined_classes(classes: Sequence[str]) -> Iterator[str]:
    """A note on a class that joins other classes by a sign, such as "a|b"."""
    for sign in "|;,":
        joined = [name for name in classes if sign in name]
        parts = {part.strip() for name in joined for part in name.split(sign)}
        if joined and (parts & {*classes} if sign in "|;" else parts <= {*classes}):
            yield (
                f"the class {joined[0]!r} may be several labels of a row; a column of lists, such "
                'as ["a", "b"], is learned as such.'
            )
            return


def _shared_rows(raw: RawRows, parts: Parts, contents: Contents) -> list[str]:
    """A note for each split with rows that are also in the training split."""
    import numpy as np

    train_split, train_rows = parts["train"]
    notes = []
    for part in parts.keys() - {"train"}:
        split, rows = parts[part]
        shared = rows[np.isin(contents[split][rows], contents[train_split][train_rows])]
        if len(shared):
            count = units.count(len(shared), "row")
            verb = "is" if len(shared) == 1 else "are"
            where = raw.place(split, shared[0])
            notes.append(f"{count} for {part} {verb} in the training split too, such as {where}.")
    return sorted(notes)


def _several_labels(
    raw: RawRows, targets: Targets, parts: Parts, contents: Contents
) -> Iterator[str]:
    """A note on rows with the same content and different labels."""
    import numpy as np

    splits = [split for split, rows in parts.values() for _ in rows]
    row_numbers = np.concatenate([rows for _, rows in parts.values()])
    content = np.concatenate([contents[split][rows] for split, rows in parts.values()])
    label = np.concatenate([targets.numbers[split][rows] for split, rows in parts.values()])
    order = np.lexsort((label, content))
    same = content[order][1:] == content[order][:-1]
    at = np.flatnonzero(same & (label[order][1:] != label[order][:-1]))
    if not len(at):
        return
    what = "image" if raw.modality == "image" else "text"
    both = " and ".join(
        f"{raw.place(splits[row], row_numbers[row])} ({targets.classes[label[row]]})"
        for row in (order[at[0]], order[at[0] + 1])
    )
    yield f"the same {what} has two labels: {both}{_more(len(np.unique(content[order][at])))}."


def _more(count: int) -> str:
    return f", and {count - 1:,} more" if count > 1 else ""
