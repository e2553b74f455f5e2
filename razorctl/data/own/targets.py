"""Labels of rows as a task learns them: an entry of READERS for each task that has labels."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from razorctl import units
from razorctl.config.tasks import NO_LABEL, TASKS, Task
from razorctl.data.own import boxes
from razorctl.data.own.labels import (
    WHOLE,
    Numbers,
    class_names_in,
    class_numbers,
    finder,
    in_order,
    named_classes,
    refuse_unknown,
    renumbered,
)
from razorctl.data.own.raw import Faults, RawRows
from razorctl.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset

OUTSIDE = "O"  # the tag of tokens outside of entities, which comes first
Good = Mapping[str, "np.ndarray[Any, Any]"]  # split -> the numbers of its good rows
LARGE, SMALL = 100, 0.01  # labels of a regression that are all outside of this give a note


@dataclass(frozen=True)
class Targets:
    """The labels of all rows.

    Args:
        classes: the names of the classes, or of the number that a regression learns.
        numbers: split -> the number of each row's class, by which rows are held out. It is -1
            without a label, and 0 for tasks without classes.
        labels: split -> the `label` of each row, as in `Splits`; empty for tasks without labels.
        faults: the rows whose labels cannot be used, apart from rows without a label.
        notes: sentences on labels that mean none, or have several spellings.
    """

    classes: tuple[str, ...]
    numbers: Numbers
    labels: Mapping[str, Any] = field(default_factory=dict)
    faults: Faults = field(default_factory=dict)
    notes: Sequence[str] = ()


def targets_of(raw: RawRows, bad: Faults) -> Targets:
    """The labels of rows; classes come from the rows that are not bad.

    Raises DataError for labels that their task cannot use.
    """
    return READERS[raw.task](raw, bad)


def targets_of_run(raw: RawRows, targets: Targets, classes: Sequence[str], good: Good) -> Targets:
    """The labels of rows, numbered by the classes of a run.

    Raises DataError for labels of good rows that are not classes of the run.
    """
    if raw.task == "multi-label":
        return _several_of_run(raw, targets, classes, good)
    if raw.task in ("token-classification", "detection"):
        return _tags_of_run(raw, targets, classes, good)
    if raw.task != "classification":
        return replace(targets, classes=tuple(classes))
    numbers = {
        split: renumbered(raw.name, labels, targets.classes, classes, good[split])
        for split, labels in targets.numbers.items()
    }
    return Targets(tuple(classes), numbers, numbers)


def check(raw: RawRows, targets: Targets, good: Good) -> None:
    """Raises DataError for training rows that have one number, or no label at all."""
    if raw.task == "multi-label" and not targets.labels["train"][good["train"]].any():
        raise DataError(f"no training row of {raw.name} has a label; give some.")
    if raw.task == "regression":
        values = targets.labels["train"][good["train"]]
        if values.min() == values.max():
            raise DataError(
                f"all training rows of {raw.name} have the label {values[0]:g}; a regression needs "
                "two or more."
            )


def notes(raw: RawRows, targets: Targets, trained: "np.ndarray[Any, Any]") -> list[str]:
    """Notes on labels. trained: the numbers of the rows that are trained on."""
    if raw.task == "detection":
        return [*targets.notes, *_few_boxes(targets, trained)]
    if raw.task not in ("regression", "multi-label"):
        return [*targets.notes]
    values = targets.labels["train"][trained]
    if raw.task == "multi-label":
        return [*targets.notes, *_unused(targets.classes, values)]
    between = f"labels are between {values.min():,g} and {values.max():,g}, "
    if abs(values).max() > LARGE:
        return [
            f"{between}and the outputs of a new head start near 0, so they may not reach them; "
            "use a larger unit or subtract the mean, so that labels are about 1."
        ]
    if abs(values).max() < SMALL:
        return [f"{between}and such small differences are not learned; use a smaller unit."]
    return []


def _unlabeled(raw: RawRows, bad: Faults) -> Targets:
    return Targets(*class_numbers(raw, bad)[:2])


def _classes(raw: RawRows, bad: Faults) -> Targets:
    names, numbers, notes = class_numbers(raw, bad)
    return Targets(names, numbers, numbers, notes=notes)


def _numbers(raw: RawRows, bad: Faults) -> Targets:
    values = {
        split: rows.data.column("number").to_numpy().astype("float64")
        for split, rows in raw.splits.items()
    }
    return replace(_unlabeled(raw, bad), labels=values)


def _scores(raw: RawRows, bad: Faults) -> Targets:
    """The scores of pairs as cosines, if there are any: divided by the largest of good rows."""
    if "number" not in raw.splits["train"].column_names:
        return replace(_unlabeled(raw, bad), classes=raw.class_names or ())
    targets = _numbers(raw, bad)
    good = [n for s, of in targets.labels.items() for n in _used(of.tolist(), bad[s]) if n == n]
    largest = max(map(abs, good), default=0.0)
    if largest <= 1:
        return targets
    scaled = {split: values / largest for split, values in targets.labels.items()}
    note = f"scores are learned as cosines: they are divided by the largest, {largest:g}."
    return replace(targets, labels=scaled, notes=(note,))


def _several(raw: RawRows, bad: Faults) -> Targets:
    """Labels [rows, classes], fp32, 0 or 1."""
    numbers = _unlabeled(raw, bad).numbers
    if "labels" not in raw.splits["train"].column_names:
        flags = {split: _flags(rows) for split, rows in raw.splits.items()}
        return Targets(raw.class_names or (), numbers, flags)
    lists = {split: rows.data.column("labels").to_pylist() for split, rows in raw.splits.items()}
    names = raw.class_names
    every = [
        labels for s, of in lists.items() for labels in _used(of, bad[s]) if labels is not None
    ]
    notes: list[str] = []
    vectors = names is None and _are_vectors(every)
    if vectors:
        width = Counter(map(len, every)).most_common(1)[0][0]
        names = tuple(map(str, range(width)))
    keys = names if raw.class_names is None else tuple(map(str, range(len(raw.class_names))))
    if not vectors:
        counts = Counter(label for labels in every for label in labels)
        spelled, none, notes = named_classes(raw, counts)
        lists = {
            split: [labels and [label for label in labels if label not in none] for labels in of]
            for split, of in lists.items()
        }
    if keys is None:
        keys = names = in_order({*spelled.values()})
    assert names is not None
    if len(names) < 2:
        raise DataError(
            f"{raw.name} has {units.count(len(names), 'label')} in its lists, and multi-label "
            "needs two or more; choose another column with --label-column."
        )
    find, labels, faults = finder(keys), {}, dict[str, dict[int, str]]()
    for split, rows in lists.items():
        labels[split], faults[split] = _matrix(rows, find, len(keys), vectors)
    return Targets(names, numbers, labels, faults, notes)


def _used(rows: Sequence[Any], bad: Mapping[int, str]) -> Iterator[Any]:
    """The values of rows that are not bad."""
    return (value for row, value in enumerate(rows) if row not in bad)


def flat(labels: "np.ndarray[Any, Any]", rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """The labels of these rows in one array; each row has a list."""
    import numpy as np

    return np.fromiter(chain.from_iterable(labels[rows]), np.int64)


def _flags(rows: "Dataset") -> "np.ndarray[Any, Any]":
    import numpy as np

    names = [name for name in rows.column_names if name.startswith("flag.")]
    columns = [rows.data.column(name).to_numpy() for name in names]
    return np.asarray(np.nan_to_num(np.stack(columns, 1)), np.float32)


def _are_vectors(lists: Sequence[Sequence[str]]) -> bool:
    """Whether lists have a 0 or 1 for each class, and not the names of the classes of a row.

    That is so if nine of ten lists have only 0 and 1, and either one of these repeats a value, such
    as [0, 0, 1], or all have one length.
    """
    binary = [labels for labels in lists if labels and {*labels} <= {"0", "1"}]
    if not binary or 10 * len(binary) < 9 * len(lists):
        return False
    alike = len({*map(len, binary)}) == 1 and len(binary[0]) > 1
    return alike or any(len({*labels}) < len(labels) for labels in binary)


def _matrix(
    rows: Sequence[Sequence[str] | None], find: Callable[[str], int], classes: int, vectors: bool
) -> tuple["np.ndarray[Any, Any]", dict[int, str]]:
    """The labels [rows, classes] of lists, and the faults of lists that cannot be used.

    find: label -> the number of its class, or -1. classes: their number. vectors: whether lists
    have a 0 or 1 for each class.
    """
    import numpy as np

    labels, faults = np.zeros((len(rows), classes), np.float32), {}
    for row, values in enumerate(rows):
        if values is None:
            continue
        if vectors:
            if odd := {*values} - {"0", "1"}:
                faults[row] = f"a label of {min(map(str, odd))}, not 0 or 1"
            elif len(values) != classes:
                faults[row] = f"{units.count(len(values), 'label')}, not {classes} as others have"
            else:
                labels[row] = np.asarray(values, np.float32)
        elif unknown := [label for label in values if find(label) < 0]:
            faults[row] = f"a label of {unknown[0]}, which is not a class"
        else:
            labels[row, [*map(find, values)]] = 1
    return labels, faults


def _unused(classes: Sequence[str], values: "np.ndarray[Any, Any]") -> list[str]:
    """A note on labels that no training row has."""
    unused = [name for number, name in enumerate(classes) if not values[:, number].any()]
    if not unused:
        return []
    few = ", ".join(unused[:5]) + (", ..." if len(unused) > 5 else "")
    return [f"{units.count(len(unused), 'label')} of {len(classes)} on no training row: {few}."]


def _objects(raw: RawRows, bad: Faults) -> Targets:
    """Labels that are lists of the number of each box's class."""
    import numpy as np

    columns = {split: boxes.labels_of(raw, split) for split in raw.splits}
    counts = Counter(chain.from_iterable(o for s, of in columns.items() for o in _used(of, bad[s])))
    spelled, _, notes = named_classes(replace(raw, sorted=True), counts)
    names = raw.class_names or in_order({*spelled.values()})
    keys = names if raw.class_names is None else tuple(map(str, range(len(names))))
    find = finder(keys)
    numbers = {label: find(name) for label, name in spelled.items()}
    labels, faults = {}, dict[str, dict[int, str]]()
    for split, rows in columns.items():
        labels[split], faults[split] = np.empty(len(rows), object), {}
        for row, of in enumerate(rows):
            labels[split][row] = [numbers.get(label, -1) for label in of]
            if -1 in labels[split][row]:
                at = labels[split][row].index(-1)
                what = f"the class {of[at]}, which is none of {units.count(len(names), 'class')}"
                faults[split][row] = f"{boxes.mark(raw, split, row, at)}: {what}"
    return Targets(names, _unlabeled(raw, bad).numbers, labels, faults, notes)


def _few_boxes(targets: Targets, rows: "np.ndarray[Any, Any]") -> Iterator[str]:
    """Notes on training images without boxes, and on classes without boxes there."""
    import numpy as np

    labels = targets.labels["train"]
    if empty := sum(not labels[row] for row in rows):
        yield f"{empty:,} of {units.count(len(rows), 'training image')} without boxes."
    unused = np.setdiff1d(np.arange(len(targets.classes)), flat(labels, rows)).tolist()
    if unused:
        few = ", ".join(targets.classes[n] for n in unused[:5]) + ", ..." * (len(unused) > 5)
        count = f"{units.count(len(unused), 'class')} of {len(targets.classes)}"
        yield f"{count} in no training image: {few}."


def _several_of_run(raw: RawRows, targets: Targets, classes: Sequence[str], good: Good) -> Targets:
    """Several labels by the classes of a run; see `targets_of_run`."""
    import numpy as np

    names = targets.classes
    if names == tuple(map(str, range(len(classes)))) and not {*names} & {*classes}:
        return replace(targets, classes=tuple(classes))  # lists of 0 and 1 name no classes
    labels, numbers = {}, [*map(finder(classes), names)]
    for split, values in targets.labels.items():
        used = [n for n in range(len(names)) if values[good[split], n].any()]
        refuse_unknown(raw.name, [names[n] for n in used if numbers[n] < 0], classes)
        labels[split] = np.zeros((len(values), len(classes)), np.float32)
        for n, number in enumerate(numbers):
            if number >= 0:
                labels[split][:, number] = values[:, n]
    return replace(targets, classes=tuple(classes), labels=labels)


def _tags(raw: RawRows, bad: Faults) -> Targets:
    """Labels that are lists of the numbers of each row's tags; NO_LABEL for tags that mean none."""
    columns = {
        split: [rows.data.column(name).to_pylist() for name in ("tokens", "tags")]
        for split, rows in raw.splits.items()
    }
    pairs = [pair for s, of in columns.items() for pair in _used([*zip(*of, strict=True)], bad[s])]
    even = (tags for words, tags in pairs if words and tags and len(words) == len(tags))
    counts = Counter(tag for tags in even for tag in tags)
    spelled, none, notes = named_classes(raw, counts)
    if raw.class_names is None:
        names = in_order({*spelled.values()} - {OUTSIDE})
        keys = names = ((OUTSIDE,) if OUTSIDE in counts else ()) + names
        if all(map(WHOLE.fullmatch, names)) and raw.root is not None:
            named = class_names_in(raw.root)
            keys, names = (tuple(map(str, range(len(named)))), named) if named else (keys, names)
    else:
        keys, names = tuple(map(str, range(len(raw.class_names)))), raw.class_names
        none |= counts.keys() & {"-1"}
    if len(names) < 2:
        raise DataError(
            f"all tokens of {raw.name} have one tag, {names[0] if names else 'none'}; a tagger "
            f"needs two or more. {' '.join(notes)}".rstrip()
        )
    numbers = {tag: finder(keys)(name) for tag, name in spelled.items()}
    numbers = {tag: n for tag, n in numbers.items() if n >= 0} | dict.fromkeys(none, NO_LABEL)
    labels, faults = {}, dict[str, dict[int, str]]()
    for split, (tokens, tags) in columns.items():
        labels[split], faults[split] = _numbered_tags(tokens, tags, numbers)
    return Targets(names, _unlabeled(raw, bad).numbers, labels, faults, notes)


def _numbered_tags(
    tokens: Sequence[Sequence[str] | None],
    tags: Sequence[Sequence[str] | None],
    numbers: Mapping[str, int],
) -> tuple["np.ndarray[Any, Any]", dict[int, str]]:
    """The numbers of tags, a list for each row, and the faults of rows whose tags are unusable.

    numbers: tag -> its number.
    """
    import numpy as np

    labels, faults = np.empty(len(tags), object), {}
    for row, (words, tagged) in enumerate(zip(tokens, tags, strict=True)):
        labels[row] = []
        if tagged is None or words is None:
            continue
        if len(tagged) != len(words):
            count = units.count(len(tagged), "tag")
            faults[row] = f"{count} for {units.count(len(words), 'token')}"
        elif unknown := [tag for tag in tagged if tag not in numbers]:
            faults[row] = f"a tag of {unknown[0]}, which is not a class"
        else:
            labels[row] = [numbers[tag] for tag in tagged]
            if tagged and {*labels[row]} == {NO_LABEL}:
                faults[row] = "no tags"
    return labels, faults


def _tags_of_run(raw: RawRows, targets: Targets, classes: Sequence[str], good: Good) -> Targets:
    """Tags by the classes of a run; see `targets_of_run`."""
    import numpy as np

    numbers = dict(enumerate(map(finder(classes), targets.classes))) | {NO_LABEL: NO_LABEL}
    labels = {}
    for split, rows in targets.labels.items():
        used = sorted({tag for row in good[split] for tag in rows[row]})
        unknown = [targets.classes[tag] for tag in used if numbers[tag] == -1]
        refuse_unknown(raw.name, unknown, classes)
        labels[split] = np.empty(len(rows), object)
        for row, tags in enumerate(rows):
            labels[split][row] = [numbers[tag] for tag in tags]
    return replace(targets, classes=tuple(classes), labels=labels)


READERS: Mapping[Task, Callable[[RawRows, Faults], Targets]] = {
    **dict.fromkeys(TASKS, _unlabeled),
    "classification": _classes,
    "regression": _numbers,
    "multi-label": _several,
    "token-classification": _tags,
    "embedding": _scores,
    "detection": _objects,
}
