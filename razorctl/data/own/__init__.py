"""Data sets of one's own: what a name that is not registered stands for."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from razorctl import units
from razorctl.config.registry import unknown
from razorctl.data import DATASETS, Progress, Source, Splits
from razorctl.data.own import folder, hub, masks, recognition, streaming, tables, tasks, texts
from razorctl.data.own.columns import Columns
from razorctl.data.own.labels import numbered
from razorctl.data.own.raw import NOT_UTF8, Raw
from razorctl.data.own.rows import faults
from razorctl.data.own.splitting import Checked, held, share
from razorctl.data.own.stream import count
from razorctl.errors import DataError, UsageError
from razorctl.folders import exists, spelled
from razorctl.job import LANGUAGE, Job, Task
from razorctl.models import Modality

T = TypeVar("T")
OF_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # what looks like ORG/NAME
SEPARATORS = tuple(filter(None, (os.sep, os.altsep)))


def find(job: Job, trained: Job | None = None) -> Source:
    """The data set that a job names by a path or by `hf:`, read as far as planning needs it.

    Of a set of the hub whose card says enough no data are fetched before they are loaded. trained:
    the job of a finished run, whose columns are used where tables have them. Raises
    UsageError if there is none or it is not clear how to use it, DataError if it cannot be used,
    and MissingError if it is not on the hub.
    """
    of_hub = job.dataset.startswith(hub.PREFIX)
    if job.streaming:
        if "classification" not in (wanted := tasks.wanted(job)):
            streaming.of_classes(job.dataset, wanted[0])
        return _streamed(job, *(streaming.of_hub(job) if of_hub else _read(job, _streams)))
    card = hub.card(job) if of_hub and trained is None else None
    if card is not None:
        return _of_card(job, card)
    return _source(job, _checked(read(job, trained), job))


def _source(job: Job, checked: Checked) -> Source:
    raw = checked.raw
    counts = checked.counts()
    found = _described(job, raw.modality, raw.told, checked.classes, counts, checked.load, raw.task)
    return _of_blocks(found) if "text" in raw.splits["train"].column_names else found


def _of_card(job: Job, card: hub.Card) -> Source:
    """The data set as the hub's card has it; what is wrong with its rows is found by loading it."""
    counts = {**card.counts}
    counts["aside"] = held(counts["train"], share(job.dataset, counts, job))
    counts["train"] -= counts["aside"]

    def load(progress: Progress = lambda _: None) -> Splits:
        return _checked(hub.read(job), job).load(progress)

    used = card.columns
    told = f"{used.told}, as its card says"
    found = _described(job, used.modality, told, card.classes, counts, load, used.task)
    return _of_blocks(found) if used.texts else found


def _streamed(job: Job, splits: Splits, used: Columns) -> Source:
    """Streams, whose rows are checked when they are read."""
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    counts = {split: count(rows) for split, rows in parts.items() if rows is not None}

    def load(_: Progress | None = None) -> Splits:
        return streaming.labeled(splits, job)

    told = f"{used.told}, streamed"
    return _described(job, used.modality, told, splits.classes, counts, load)


def _described(
    job: Job,
    modality: Modality,
    told: str,
    classes: Sequence[str],
    counts: Mapping[str, int | None],
    load: Callable[..., Splits],
    task: Task = "classification",
) -> Source:
    evaluated = "test" if "test" in counts else "validation"
    return Source(
        job.dataset,
        told,
        modality,
        len(classes),
        counts["train"],
        counts.get(evaluated) or counts.get("aside"),
        load,
        _told(job.dataset, told, task, classes, counts),
        task=task,
        validated="validation" in counts or bool(counts.get("aside")),
        evaluated_examples=counts.get("validation") or counts.get("aside") or counts.get("test"),
    )


def _of_blocks(source: Source) -> Source:
    """The data set without numbers of examples if these are blocks of tokens, not its texts."""
    if source.task not in LANGUAGE:
        return source
    return replace(source, train_examples=None, test_examples=None, evaluated_examples=None)


def read(job: Job, trained: Job | None = None) -> Raw:
    """The rows of the data set that a job names by a path or by `hf:`; as `find` takes them."""
    if job.dataset.startswith(hub.PREFIX):
        return hub.read(job, trained)
    return _read(job, partial(_raw, trained=trained))


def _checked(raw: Raw, job: Job) -> Checked:
    """The rows with all that is wrong with them; refuses them at once if that is known by now."""
    for split, own in raw.names.items():
        if not len(raw.splits[split]):
            raise DataError(f"{own} of {raw.name} has no rows; add some, or name other splits.")
    if raw.task in LANGUAGE:
        raw = texts.divided(raw, job)
    elif raw.task == "segmentation":
        raw = masks.named(raw)
    classes, numbers = numbered(raw)
    checked = Checked(raw, job, classes, numbers, faults(raw, numbers))
    if not job.skip_bad and (any(checked.faults.values()) or raw.nowhere):
        checked.looked(lambda _: None)
    return checked


def _read(job: Job, found: Callable[[Path, Job], T]) -> T:
    """What `found` makes of the file or the folder that a job names."""
    name, path = job.dataset, Path(job.dataset).expanduser()
    if not exists(path):
        if any(separator in name for separator in SEPARATORS):
            hub = f", or write hf:{name} for a set of the hub" * bool(OF_HUB.fullmatch(name))
            raise UsageError(f"{name} does not exist; name a file or a folder that does{hub}.")
        more = ", and no such file exists (sets of the hub are hf:ORG/NAME)"
        raise unknown("data set", name, DATASETS, more)
    whole = str(path.resolve())
    if spelled(whole) != whole:
        raise DataError(f"{spelled(whole)}: {NOT_UTF8}.")
    try:
        return found(path, job)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(
            f"{error.filename or name} cannot be read ({reason}); correct that."
        ) from None


def _raw(path: Path, job: Job, trained: Job | None = None) -> Raw:
    name, wanted, language = job.dataset, tasks.wanted(job), tasks.language(job)
    if language is not None and texts.is_text(path):
        return texts.read(name, path, {path.stem: [path]}, job, language)
    found = _tables(path, job, trained)
    if found is not None:
        return tables.read(name, found)
    recognition.refuse_folder(name, path, job, wanted)
    if "segmentation" in wanted and (parts := masks.layout(path)) is not None:
        return masks.read(name, path, parts, job)
    if language is not None and (files := texts.in_folder(path)):
        return texts.read(name, path, files, job, language)
    if "classification" not in wanted:
        raise tasks.unserved(name, wanted)
    return folder.read(name, path, job)


def _streams(path: Path, job: Job) -> tuple[Splits, Columns]:
    language = tasks.language(job) is not None
    found = None if language and texts.is_text(path) else _tables(path, job)
    if found is None:
        raise UsageError(
            f"{job.dataset} is no table, so it is read whole; leave --streaming out."
            if language
            else f"{job.dataset} is a folder of images, which are read as they come anyway; leave "
            "--streaming out."
        )
    return streaming.of_tables(job, found)


def _tables(path: Path, job: Job, trained: Job | None = None) -> tables.Tables | None:
    """The tables at a path; None if it is a folder without tables."""
    name = job.dataset
    if path.is_dir():
        found = tables.in_folder(path)
        return tables.find(name, found, job, trained) if found else None
    if path.suffix.casefold() in folder.ARCHIVES:
        raise DataError(f"{name} is an archive; unpack it, and name the folder.")
    if path.suffix.casefold() == ".json":
        raise recognition.refuse_document(name, path, job, tasks.wanted(job)[0])
    if not tables.is_table(path):
        plain = texts.SUFFIXES if tasks.language(job) is not None else ()
        kinds = ", ".join(s.removeprefix(".").upper() for s in (*plain, *tables.SUFFIXES))
        raise UsageError(f"{name} is no table of a known kind; give {kinds} or a folder of images.")
    return tables.find(name, {path.stem: [path]}, job, trained, single=True)


def _told(
    name: str,
    told: str,
    task: Task,
    classes: Sequence[str],
    counts: Mapping[str, int | None],
) -> tuple[str, ...]:
    """Lines on what was detected."""
    few = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
    rows = counts["train"]
    said = "an unknown number of rows" if rows is None else units.count(rows, "row")
    parts = [f"{said} to train on"]
    if counts.get("aside"):
        parts.append(f"{_number(counts['aside'])} put aside for validation")
    parts += [
        f"{_number(counts[split])} for {split}"
        for split in ("validation", "test")
        if split in counts
    ]
    return (
        f"{name}: {told}",
        f"{units.count(len(classes), 'class')}: {few}" if classes else f"for {task}",
        ", ".join(parts),
    )


def _number(rows: int | None) -> str:
    return "an unknown number of" if rows is None else f"{rows:,}"
