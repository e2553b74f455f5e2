"""Data sets of one's own: what a name that is not registered stands for."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from razorctl import units
from razorctl.config.registry import unknown
from razorctl.data import DATASETS, Progress, Source, Splits
from razorctl.data.own import (
    folder,
    hub,
    recognition,
    stream,
    tables,
    texts,
    unsupported,
    unsupported_folders,
)
from razorctl.data.own.ask import Ask
from razorctl.data.own.columns import Columns
from razorctl.data.own.raw import NOT_UTF8, Raw
from razorctl.data.own.splitting import Checked, checked, held
from razorctl.errors import DataError, UsageError
from razorctl.folders import exists, spelled
from razorctl.job import Job
from razorctl.models import Modality
from razorctl.tasks import LANGUAGE, Task

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
    ask = Ask.of(job, trained)
    of_hub = ask.name.startswith(hub.PREFIX)
    if ask.streaming:
        if "classification" not in ask.tasks:
            stream.refuse_task(ask, ask.tasks[0])
        return _streamed(ask, *(hub.streams(ask) if of_hub else _read(ask, _streams)))
    card = hub.card(ask) if of_hub and trained is None else None
    if card is not None:
        return _of_card(ask, card)
    return _source(checked(ask, read(ask)))


def _source(checked: Checked) -> Source:
    ask, raw = checked.ask, checked.raw
    counts = checked.counts()
    found = _described(ask, raw.modality, raw.told, checked.classes, counts, checked.load, raw.task)
    return _of_blocks(found) if "text" in raw.splits["train"].column_names else found


def _of_card(ask: Ask, card: hub.Card) -> Source:
    """The data set as the hub's card has it; what is wrong with its rows is found by loading it."""
    counts = {**card.counts}
    counts["aside"] = held(counts["train"], ask.share(counts))
    counts["train"] -= counts["aside"]

    def load(progress: Progress = lambda _: None) -> Splits:
        return checked(ask, hub.read(ask)).load(progress)

    used = card.columns
    told = f"{used.told}, as its card says"
    found = _described(ask, used.modality, told, card.classes, counts, load, used.task)
    return _of_blocks(found) if used.texts else found


def _streamed(ask: Ask, splits: Splits, used: Columns) -> Source:
    """Streams, whose rows are checked when they are read."""
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    counts = {split: stream.count(rows) for split, rows in parts.items() if rows is not None}

    def load(_: Progress | None = None) -> Splits:
        return stream.labeled(ask, splits)

    told = f"{used.told}, streamed"
    return _described(ask, used.modality, told, splits.classes, counts, load)


def _described(
    ask: Ask,
    modality: Modality,
    told: str,
    classes: Sequence[str],
    counts: Mapping[str, int | None],
    load: Callable[..., Splits],
    task: Task = "classification",
) -> Source:
    evaluated = "test" if "test" in counts else "validation"
    return Source(
        ask.name,
        told,
        modality,
        len(classes),
        counts["train"],
        counts.get(evaluated) or counts.get("aside"),
        load,
        _told(ask.name, told, task, classes, counts),
        task=task,
        validated="validation" in counts or bool(counts.get("aside")),
        evaluated_examples=counts.get("validation") or counts.get("aside") or counts.get("test"),
    )


def _of_blocks(source: Source) -> Source:
    """The data set without numbers of examples if these are blocks of tokens, not its texts."""
    if source.task not in LANGUAGE:
        return source
    return replace(source, train_examples=None, test_examples=None, evaluated_examples=None)


def read(ask: Ask) -> Raw:
    """The rows of the data set that is named by a path or by `hf:`; as `find` takes them."""
    return hub.read(ask) if ask.name.startswith(hub.PREFIX) else _read(ask, _raw)


def _read(ask: Ask, found: Callable[[Ask, Path], T]) -> T:
    """The data of the file or the folder that is named, as `found` returns them."""
    name, path = ask.name, Path(ask.name).expanduser()
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
        return found(ask, path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise DataError(
            f"{error.filename or name} cannot be read ({reason}); correct that."
        ) from None


def _raw(ask: Ask, path: Path) -> Raw:
    language = ask.language
    if language is not None and texts.is_text(path):
        return texts.read(ask, path, {path.stem: [path]}, language)
    found = _tables(ask, path)
    if found is not None:
        return tables.read(ask, found)
    unsupported_folders.refuse_folder(ask, path)
    if "segmentation" in ask.tasks and (parts := folder.layout(path)) is not None:
        return folder.masked(ask, path, parts)
    if language is not None and (files := texts.in_folder(path)):
        return texts.read(ask, path, files, language)
    if "classification" not in ask.tasks:
        raise recognition.unserved(ask)
    return folder.read(ask, path)


def _streams(ask: Ask, path: Path) -> tuple[Splits, Columns]:
    language = ask.language is not None
    found = None if language and texts.is_text(path) else _tables(ask, path)
    if found is None:
        raise UsageError(
            f"{ask.name} is no table, so it is read whole; leave --streaming out."
            if language
            else f"{ask.name} is a folder of images, which are read as they come anyway; leave "
            "--streaming out."
        )
    return tables.streams(ask, found), found.columns


def _tables(ask: Ask, path: Path) -> tables.Tables | None:
    """The tables at a path; None if it is a folder without tables."""
    name = ask.name
    if path.is_dir():
        found = tables.in_folder(path)
        return tables.find(ask, found) if found else None
    if path.suffix.casefold() in folder.ARCHIVES:
        raise DataError(f"{name} is an archive; unpack it, and name the folder.")
    if path.suffix.casefold() == ".json":
        raise unsupported.refuse_document(ask, path)
    if not tables.is_table(path):
        plain = texts.SUFFIXES if ask.language is not None else ()
        kinds = ", ".join(s.removeprefix(".").upper() for s in (*plain, *tables.SUFFIXES))
        raise UsageError(f"{name} is no table of a known kind; give {kinds} or a folder of images.")
    return tables.find(ask, {path.stem: [path]}, single=True)


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
        parts.append(f"{_number(counts['aside'])} held out for validation")
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
