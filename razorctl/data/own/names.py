"""Which of the splits that the data have are train, validation and test."""

from collections.abc import Collection, Sequence

from razorctl.errors import DataError, UsageError
from razorctl.job import Job

KNOWN = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing"),
}


def role(name: str) -> str | None:
    """The split that is usually called so; None if there is none."""
    return next((split for split in KNOWN if name.casefold() in KNOWN[split]), None)


def chosen(name: str, found: Collection[str], job: Job) -> dict[str, str]:
    """`train`, `validation` and `test`, as far as they are used -> the name in the data.

    found: the names of all splits in the data. Raises UsageError if a given split is not there, or
    if it is not clear which one to use.
    """
    if job.split is not None:
        return _given(name, found, job.split)
    splits: dict[str, str] = {}
    for own in found:
        split = role(own)
        if split is not None and splits.setdefault(split, own) != own:
            raise UsageError(
                f"{name} has the splits {splits[split]} and {own}, which are the same; choose with "
                "--split."
            )
    if "train" not in splits:
        if len(found) == 1 and not splits:
            return {"train": next(iter(found))}
        raise UsageError(
            f"none of the splits of {name} is called train, only {', '.join(found)}; name those to "
            "use with --split train,validation,test."
        )
    return {split: splits[split] for split in KNOWN if split in splits}


def _given(name: str, found: Collection[str], given: str) -> dict[str, str]:
    parts: Sequence[str] = [part.strip() for part in given.split(",")]
    named = [part for part in parts if part]
    if not parts[0] or len(parts) > 3 or len(set(named)) < len(named):
        raise UsageError(
            f"split {given!r} does not name up to three splits; give train,validation,test."
        )
    for part in named:
        if part not in found:
            raise UsageError(
                f"{name} has no split {part}, only {', '.join(found)}; name others with --split."
            )
    return {split: part for split, part in zip(KNOWN, parts, strict=False) if part}


def no_splits(name: str, job: Job) -> None:
    """Raises UsageError if splits are given for data without any."""
    if job.split is not None:
        raise UsageError(f"{name} has no splits to choose from; leave --split out.")


def empty(name: str, split: str) -> DataError:
    """The error for a split without rows."""
    return DataError(f"{name} has no rows in its {split} split; add some, or leave the split out.")
