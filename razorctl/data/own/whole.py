"""Data for predict and evaluate: nothing is held out; labels are the model's classes, or absent."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.config.job import Job
from razorctl.data.own import boxes, read, rows, targets
from razorctl.data.own.raw import Fault, RawRows, content, refusal
from razorctl.data.own.read import layout, tables
from razorctl.data.own.request import STDIN, DataRequest
from razorctl.data.own.splitting import Inspection, SplitRows, read_labels, select_rows
from razorctl.data.own.targets import Targets
from razorctl.errors import DataError, UsageError
from razorctl.models import Modality, Progress
from razorctl.system.folders import exists, spelled

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset


def labeled(
    job: Job,
    modality: Modality,
    classes: Sequence[str],
    progress: Progress = lambda _: None,
    white: int | None = None,
    trained: Job | None = None,
) -> tuple["Dataset", str | None, tuple[str, ...]]:
    """The rows of the test split of a job's data, or else of validation, or else of training.

    Returns the rows, the name of the split in the data or None if there is one split, and a line
    for each bad row that is left out. Raises DataError also for labels that are no classes.

    Args:
        job: names the data, and may name the split.
        modality: of the model.
        classes: the classes of the model; labels are their numbers.
        progress: called with a text on the progress.
        white: the level of white in the images that the model was trained on; None is the level
            in these images.
        trained: the job of the run, whose columns are used where a table has them.
    """
    job = replace(job, task=job.task or "classification")
    request = DataRequest.of(job, trained, classes=tuple(classes))
    raw = read.raw(request)
    if raw.modality != modality:
        raise UsageError(
            f"{job.model} takes {modality}s, and {raw.name} has {raw.modality}s; name other data, "
            f"or its {modality}s with --{modality}-column."
        )
    split = next(split for split in ("test", "validation", "train") if split in raw.splits)
    name = raw.names[split] if len(raw.splits) > 1 or job.split else None
    if not len(raw.splits[split]):
        raise rows.empty(raw.name, raw.names[split])
    raw = replace(raw, splits={split: raw.splits[split]}, names={split: raw.names[split]})
    raw = boxes.settled(raw, request)
    labels, faults = read_labels(request, raw, {})
    # Before images are read, so that unknown labels are refused at once.
    of_run = targets.targets_of_run(raw, labels, classes, rows.good(labels.numbers, faults))
    checked = SplitRows(request, raw, of_run, faults)
    inspection = checked.inspect(progress)
    good = rows.good(labels.numbers, inspection.faults)[split]
    if not len(good):
        raise DataError(f"{raw.name} has only bad rows; correct some.")
    return whitened(checked.data(split, good, inspection), white), name, inspection.skipped


def whitened(data: "Dataset", white: int | None) -> "Dataset":
    """The rows; rows of images get this level of white, unless it is None."""
    import numpy as np

    if white is None or "image" not in data.column_names:
        return data
    plain = data.remove_columns({"white"} & {*data.column_names})
    return plain.add_column("white", np.full(len(data), white))


@dataclass(frozen=True)
class UnlabeledRows:
    """Good rows without labels of one table, one text file, or several image files.

    raw: the stored rows, in the test split. good: the numbers of good rows, counted from 0. white:
    the level of white in images.
    """

    raw: RawRows
    good: "np.ndarray[Any, Any]"
    white: int | None = None

    @property
    def data(self) -> "Dataset":
        """The good rows, as in `Splits` but without labels."""
        return whitened(select_rows(self.raw, "test", self.good), self.white)

    @property
    def table(self) -> tables.TableFile | None:
        """The table that has the rows; None for text files and image files."""
        path = Path(self.raw.name)
        return tables.table_file(path) if layout.is_table(path) else None

    def kept(self) -> Iterator[Mapping[str, Any]]:
        """All columns of the table of each row; {} without a table."""
        if self.table is None:
            yield from ({} for _ in self.good)
            return
        good = {*self.good.tolist()}
        yield from (row for number, row in enumerate(self.table.rows()) if number in good)

    @property
    def places(self) -> Iterator[tuple[str, int | None]]:
        """The file of each row and, in a table or a text file, its number there."""
        stored = self.raw.splits["test"]
        if "name" in stored.column_names:
            files = stored.data.column("image")
            return ((files[row].as_py(), None) for row in self.good)
        return ((self.raw.name, int(row)) for row in self.good)

    def place(self, row: int) -> str:
        """The place of a stored row by its number, for a sentence."""
        return self.raw.place("test", row)

    @property
    def names(self) -> Iterator[Path]:
        """The names of results: the path of each image in its folder, without the ending.

        For an image inside a table it is the name of the table with the row: `photos-3`.
        """
        stored = self.raw.splits["test"]
        images = stored.data.column("image")
        top = (self.raw.root or Path()).absolute()
        names = stored.data.column("name") if "name" in stored.column_names else None
        for row in self.good:
            image = content(images[row].as_py())
            if names is not None:
                yield Path(names[row].as_py()).with_suffix("")
            elif isinstance(image, str) and Path(image).is_relative_to(top):
                yield Path(image).relative_to(top).with_suffix("")
            else:
                yield Path(f"{Path(self.raw.name).stem}-{row}")


def unlabeled(
    files: Sequence[str],
    job: Job,
    modality: Modality,
    stdin: Iterable[str] = (),
    progress: Progress = lambda _: None,
    white: int | None = None,
    trained: Job | None = None,
) -> tuple[list[UnlabeledRows], tuple[str, ...]]:
    """The rows of files for a model, and a line for each bad row that is left out.

    Raises UsageError for files that do not exist or are of another kind, and DataError for bad rows
    that the job does not skip.

    files: tables, images, text files whose empty lines do not count, and folders of these; STDIN
    stands for the lines in `stdin`, texts or paths of images. Others: as in `labeled`.
    """
    _check_files(files, job, modality)
    parts: list[UnlabeledRows] = []
    bad: list[Fault] = []
    count, whites = 0, set[int | None]()
    request = DataRequest.of(job, trained, skip_bad=True)
    for raw in read.unlabeled(request, files, modality, stdin):
        part, inspection = _good(request, raw, progress)
        parts.append(part)
        bad += raw.with_places(inspection.faults)
        count += len(raw.splits["test"])
        whites.add(inspection.white)
    if bad and not job.skip_bad:
        name = spelled(files[0]) if len(files) == 1 and files[0] != STDIN else "the list of files"
        raise refusal(name, bad, count)
    white = max(filter(None, whites), default=None) if white is None else white
    return [replace(part, white=white) for part in parts], tuple(map(str, bad))


def _check_files(files: Sequence[str], job: Job, modality: Modality) -> None:
    """Raises UsageError for files that do not exist, and for a column of the other modality."""
    other = "text" if modality == "image" else "image"
    both = job.task == "embedding" and modality == "image"
    if not both and getattr(job, f"{other}_column") is not None:
        raise UsageError(f"{job.model} takes {modality}s; leave --{other}-column out.")
    absent = [name for name in files if name != STDIN and not exists(Path(name))]
    if absent:
        verb = "does not exist" if len(absent) == 1 else "do not exist"
        raise UsageError(f"{', '.join(map(spelled, absent))} {verb}; name files that do.")


def _good(
    request: DataRequest, raw: RawRows, progress: Progress
) -> tuple[UnlabeledRows, Inspection]:
    """The good rows, and the inspection of all; blank lines are neither good nor bad."""
    import numpy as np

    stored = raw.splits["test"]
    blank: set[int] = set()
    if raw.blanks:
        blank = {row for row, text in enumerate(stored["text"]) if not text.strip()}
    numbers = {"test": np.zeros(len(stored), np.int64)}
    faults = rows.faults(raw, answered=False)["test"]
    faults = {row: reason for row, reason in faults.items() if row not in blank}
    inspection = SplitRows(request, raw, Targets((), numbers), {"test": faults}).inspect(progress)
    good = np.setdiff1d(rows.good(numbers, inspection.faults)["test"], sorted(blank))
    return UnlabeledRows(raw, good), inspection
