"""What a user may not have meant with rows that can be used: a sentence for each kind of thing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl import units
from razorctl.data.own.columns import SUFFIXES, Columns, Sample
from razorctl.data.own.labels import Numbers
from razorctl.data.own.raw import Raw

if TYPE_CHECKING:
    import numpy as np

Rows = Mapping[str, "np.ndarray[Any, Any]"]  # split -> the numbers of its rows, as they are stored


def of(
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


def header(file: Path, sample: Sample, used: Columns) -> tuple[str, ...]:
    """A note on a table whose header may be its first row."""
    labels = {str(label) for label in sample.values.get(used.label, ())}
    if used.label in labels:
        sign = f"{used.label!r} is a label of other rows"
    elif used.image is not None and Path(used.image).suffix.casefold() in SUFFIXES:
        sign = f"{used.image!r} is an image"
    else:
        return ()
    return (f"the first line of {file} looks like a row, not like a header: {sign}.",)


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
