"""The rows that a finished run is evaluated on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl import data, models
from razorctl.config.job import Job
from razorctl.config.tasks import CLASSED
from razorctl.data import own
from razorctl.data.own import whole
from razorctl.data.own.labels import renumbered
from razorctl.data.own.splitting import digested
from razorctl.errors import DataError, UsageError
from razorctl.training import run_files

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class LabeledRows:
    """Rows whose labels are numbers of a run's classes.

    split: the name of the split; None for data without splits. skipped: a line for each bad row
    that is left out.
    """

    rows: "Dataset"
    split: str | None
    skipped: Sequence[str] = ()


def rows_of_run(
    run: Path | str, split: str | None = None, progress: models.Progress = lambda _: None
) -> LabeledRows:
    """The rows of a split of the data of a finished run.

    split: "train", "validation" or "test"; None is the split of the run's result. Raises what
    `run_files.finished_run` and loading the data raise, and DataError if the data has changed.
    """
    run = Path(run)
    result, job = run_files.finished_run(run)
    registered = job.dataset in data.DATASETS
    source = data.source_of(job) if registered else own.find(job, classes=result["classes"])
    splits = digested(source.load(progress))
    if run_files.read_split(run) != run_files.split_document(splits):
        raise DataError(
            f"{job.dataset} has changed since {run} was trained on it, so that other rows would be "
            "held out; undo that, or name data to evaluate."
        )
    name = split or result["split"]
    return LabeledRows(
        _renumbered(job.dataset, splits, name, result["classes"]), name, splits.skipped
    )


def rows_of_job(
    run: Path | str, job: Job, split: str | None = None, progress: models.Progress = lambda _: None
) -> LabeledRows:
    """The rows of a job's data set, with labels as numbers of a finished run's classes.

    split: its name in the data; None is the test split, else the validation split, else all rows.
    Raises what `run_files.finished_run` and reading the data raise, and DataError for labels of no
    class.
    """
    result, trained = run_files.finished_run(Path(run))
    if job.dataset in data.DATASETS:
        splits = data.pair(job)[1].load(progress)
        name = split or ("test" if splits.test is not None else "validation")
        return LabeledRows(_renumbered(job.dataset, splits, name, result["classes"]), name)
    job = replace(job, split=split)
    found = run_files.read_split(Path(run))
    white = found.get("white")
    trained = replace(trained, box_format=trained.box_format or found.get("box_format"))
    if job.task not in (None, *CLASSED):
        labeled = _evaluated(job, trained, result["classes"], progress)
        return replace(labeled, rows=whole.whitened(labeled.rows, white))
    modality = models.named(job.model).modality
    return LabeledRows(*whole.labeled(job, modality, result["classes"], progress, white, trained))


def _evaluated(
    job: Job, trained: Job, classes: list[str], progress: models.Progress
) -> LabeledRows:
    """The test split of texts or masks, else the validation split, else all rows."""
    from datasets import concatenate_datasets

    splits = own.find(job, trained).load(progress)
    if (
        [*splits.classes] != classes
        and job.task == "segmentation"
        and all(map(str.isdecimal, classes))
    ):
        by_values = replace(job, mask_values=",".join(classes))  # names of classes are values here
        splits = own.find(by_values, trained).load(progress)
    if [*splits.classes] != classes:
        raise DataError(
            f"{job.dataset} has other classes than the run was trained on; name other data."
        )
    if splits.record is not None and splits.test is None:  # the data has no validation split
        rows = concatenate_datasets([splits.train, splits.validation])
        return LabeledRows(rows, None, splits.skipped)
    name, rows = splits.evaluated if splits.test is None else ("test", splits.test)
    return LabeledRows(rows, name, splits.skipped)


def _renumbered(name: str, splits: data.Splits, split: str, classes: list[str]) -> Any:
    """The rows of a split, with labels as numbers of `classes`."""
    import numpy as np

    rows: Any = splits.parts.get(split)
    if rows is None:
        names = ", ".join(splits.parts)
        raise UsageError(f"{name} has no split {split}, only {names}; name one of them.")
    if [*splits.classes] == classes or len(classes) == 1:  # one class is a number to predict
        return rows
    labels = renumbered(name, np.asarray(rows["label"][:]), splits.classes, classes)
    return rows.remove_columns("label").add_column("label", labels)
