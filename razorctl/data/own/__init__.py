"""Data sets of one's own: what a name that is not registered stands for."""

import os
from pathlib import Path

from razorctl.config.registry import unknown
from razorctl.data import DATASETS, Source
from razorctl.data.own import folder, hub, tables
from razorctl.data.own.labels import numbered
from razorctl.data.own.raw import Raw
from razorctl.data.own.rows import faults
from razorctl.data.own.splitting import Checked
from razorctl.errors import DataError, UsageError
from razorctl.job import Job

SEPARATORS = tuple(filter(None, (os.sep, os.altsep)))


def find(job: Job) -> Source:
    """The data set that a job names by a path or by `hf:`, read as far as planning needs it.

    Raises UsageError if there is none or it is not clear how to use it, DataError if it cannot be
    used, and MissingError if it is not on the hub.
    """
    checked = _checked(read(job), job)
    raw, counts = checked.raw, checked.counts()
    evaluated = "test" if "test" in counts else "validation"
    return Source(
        raw.name,
        raw.told,
        raw.modality,
        len(checked.classes),
        counts["train"],
        counts.get(evaluated) or counts["aside"],
        checked.load,
        _told(checked, counts),
    )


def read(job: Job) -> Raw:
    """The rows of the data set that a job names by a path or by `hf:`; raises as `find`."""
    return hub.read(job) if job.dataset.startswith(hub.PREFIX) else _local(job)


def _checked(raw: Raw, job: Job) -> Checked:
    """The rows with all that is wrong with them; refuses them at once if that is known by now."""
    for split, own in raw.names.items():
        if not len(raw.splits[split]):
            raise DataError(f"{own} of {raw.name} has no rows; add some, or name other splits.")
    classes, numbers = numbered(raw)
    checked = Checked(raw, job, classes, numbers, faults(raw, numbers))
    if not job.skip_bad and (any(checked.faults.values()) or raw.nowhere):
        checked.refuse(lambda _: None)
    return checked


def _local(job: Job) -> Raw:
    """The rows of a file or a folder."""
    name, path = job.dataset, Path(job.dataset).expanduser()
    if not path.exists():
        if any(separator in name for separator in SEPARATORS):
            raise UsageError(f"{name} does not exist; name a file or a folder that does.")
        raise unknown("data set", name, DATASETS, ", and no such file exists")
    try:
        return _read(name, path, job)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(
            f"{error.filename or name} cannot be read ({reason}); correct that."
        ) from None


def _read(name: str, path: Path, job: Job) -> Raw:
    if path.is_dir():
        found = tables.in_folder(path)
        return tables.read(name, found, job) if found else folder.read(name, path, job)
    if path.suffix.casefold() in folder.ARCHIVES:
        raise DataError(f"{name} is an archive; unpack it, and name the folder.")
    if not tables.is_table(path):
        kinds = ", ".join(suffix.removeprefix(".").upper() for suffix in tables.SUFFIXES)
        raise UsageError(f"{name} is no table of a known kind; give {kinds} or a folder of images.")
    return tables.read(name, {path.stem: [path]}, job, single=True)


def _told(checked: Checked, counts: dict[str, int]) -> tuple[str, ...]:
    """Lines on what was detected."""
    raw, classes = checked.raw, checked.classes
    few = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
    parts = [f"{counts['train']:,} rows to train on"]
    if counts["aside"]:
        parts.append(f"{counts['aside']:,} put aside for validation")
    parts += [
        f"{counts[split]:,} for {split}" for split in ("validation", "test") if split in counts
    ]
    return (
        f"{raw.name}: {raw.told}",
        f"{len(classes):,} classes: {few}",
        ", ".join(parts),
    )
