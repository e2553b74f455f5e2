"""Predictions of a finished run: its options are checked, its data read, its rows predicted."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.cli.settings import Call, of_other_data
from razorctl.cli.views import common as views
from razorctl.cli.views import evaluate as evaluation
from razorctl.cli.views import predict as view
from razorctl.errors import UsageError

# Functions below import what --help does not need.
if TYPE_CHECKING:
    from razorctl.config.job import Job
    from razorctl.data.own.whole import UnlabeledRows
    from razorctl.training.predicting.inference import Trained

NEW_TOKENS = 64
# Option -> the tasks that it applies to.
TASK_OPTIONS = {
    "top": ("classification",),
    "probabilities": ("classification", "multi-label"),
    **dict.fromkeys(("max_new_tokens", "temperature", "seed"), ("causal-lm",)),
    **dict.fromkeys(("threshold", "draw"), ("detection",)),
}
OPTIONS = (*TASK_OPTIONS, "out", "keep_columns")


@dataclass(frozen=True)
class ReadData:
    """The model of a run, and the good rows of files; skipped: a line for each bad row."""

    model: "Trained"
    parts: list["UnlabeledRows"]
    skipped: Sequence[str]


def checked_job(run: Path, options: Mapping[str, Any], given: Collection[str]) -> "Job":
    """The job of a finished run.

    Raises UsageError for a task without predictions, for an option of another task, and for a
    folder to write that exists.

    options: the values of OPTIONS. given: the names of the options that the user gives.
    """
    from razorctl.training import run_files

    _, job = run_files.finished_run(run)
    task = job.task or "classification"
    if task == "masked-lm":
        raise UsageError(
            f"{run} is for masked-lm, which continues no texts; fill masks with transformers' "
            f"pipeline('fill-mask', '{run}'), or name a run for another task."
        )
    for name, tasks in TASK_OPTIONS.items():
        if task not in tasks and name in given:
            flag = name.replace("_", "-")
            raise UsageError(
                f"--{flag} is for {' and '.join(tasks)}, and {run} is for {task}; leave it out."
            )
    if task == "segmentation":
        if options["out"] is None:
            raise UsageError(f"{run} predicts masks; name a new directory for them with --out.")
        _check_folder(options["out"])
    if options["draw"] is not None:
        _check_folder(options["draw"])
    return job


def _check_folder(out: Path) -> None:
    """Raises UsageError if `out` exists or cannot be made."""
    from razorctl.system import atomic

    with atomic.writing(out):
        with atomic.atomic_folder(out):
            pass
        out.rmdir()


def read(
    call: Call,
    run: Path,
    files: Sequence[str],
    stdin: Sequence[str],
    weights: str | None,
    device: str | None,
) -> ReadData:
    """The model of a run, and the rows of files; a dash stands for the lines in `stdin`."""
    from razorctl import models
    from razorctl.data.own import whole
    from razorctl.training import run_files

    given = call.explicit.given
    _, trained = run_files.finished_run(run)
    job = replace(trained, **of_other_data(given))
    with views.status("reading the files") as at:
        modality = models.named(job.model).modality
        white = run_files.read_split(run).get("white")
        parts, skipped = whole.unlabeled(files, job, modality, stdin, at, white, trained)
        at(f"loading {run}")
        from razorctl.training.predicting import inference

        model = inference.load(
            run, weights=weights, device=device, batch_size=given.get("batch_size")
        )
    evaluation.note_skipped(skipped)
    return ReadData(model, parts, skipped)


@contextmanager
def files_of(data: Any, job: "Job") -> Iterator[tuple[list[str], list[str], bool]]:
    """Yields files and lines of stdin for the data of `finished.predict`, and if they are files.

    Raises what `in_memory.lent` raises. job: of the run.
    """
    from razorctl import models
    from razorctl.data.own import in_memory
    from razorctl.data.own.request import STDIN
    from razorctl.system.folders import exists

    names = [data] if isinstance(data, (str, os.PathLike)) else data
    listed = isinstance(names, Sequence) and len(names) > 0
    if not (listed and all(isinstance(each, (str, os.PathLike)) for each in names)):
        with in_memory.lent(data) as file:
            yield [str(file)], [], False
        return
    takes_texts = job.task == "embedding" or models.named(job.model).modality == "text"
    absent = all(isinstance(each, str) and not exists(Path(each)) for each in names)
    if takes_texts and absent and names is data:
        yield [STDIN], [*names], False
    else:
        yield [*map(os.fspath, names)], [], True


@contextmanager
def predictions(
    data: ReadData, options: Mapping[str, Any], by_image: bool
) -> Iterator[tuple[view.RowFormat, Iterable[Any]]]:
    """Yields the format and the rows of predictions, and shows how many are done.

    The arguments are as in `_predictions`.
    """
    from razorctl.cli import progress

    total = sum(len(part.good) for part in data.parts)
    with progress.count_rows("predicting", total) as done:
        row_format, rows = _predictions(data.model, data.parts, options, by_image, done)
        if options["keep_columns"]:
            row_format = view.with_columns(row_format, data.parts)
        yield row_format, rows


def _predictions(
    model: "Trained",
    parts: list["UnlabeledRows"],
    options: Mapping[str, Any],
    by_image: bool,
    done: Callable[[int], None],
) -> tuple[view.RowFormat, Iterable[Any]]:
    """The format and the rows of a model's predictions; rows are predicted as they are read.

    Args:
        model: the model of the run.
        parts: the rows of files.
        options: the values of OPTIONS.
        by_image: whether the objects of an image are one row.
        done: called with the number of done rows.
    """
    from razorctl.training.detections import LEAST
    from razorctl.training.predicting import continuations, labels, masks, objects, tags

    task, every = model.job.task, options["probabilities"]
    if task == "segmentation":
        written = masks.write_masks(model, parts, options["out"], done)
        return view.fields_format("mask", "label", "share"), written
    rows: Iterator[Any]
    if task == "detection":
        least = LEAST if options["threshold"] is None else options["threshold"]
        if (drawn := options["draw"]) is not None:
            rows = iter(objects.draw_objects(model, parts, drawn, least, done))
        else:
            rows = view.report_progress(objects.find_objects(model, parts, least), done)
        found = rows if by_image else (one for row in rows for one in row.objects)
        return view.fields_format("label", "score", "left", "top", "right", "bottom"), found
    if task == "token-classification":
        row_format, rows = view.fields_format("tokens", "tags"), tags.predict_tags(model, parts)
    elif task == "causal-lm":
        new, temperature = options["max_new_tokens"] or NEW_TOKENS, options["temperature"] or 0.0
        rows = continuations.continue_texts(model, parts, new, temperature, options["seed"] or 0)
        row_format = view.fields_format("text")
    elif task == "embedding":
        from razorctl.training.predicting import vectors

        row_format, rows = view.vectors_format(), vectors.predict_vectors(model, parts)
    elif task == "regression":
        row_format, rows = view.fields_format("value"), labels.predict_numbers(model, parts)
    elif task == "multi-label":
        row_format = view.several_format(model.classes, every)
        rows = labels.predict_several(model, parts)
    else:
        row_format = view.labels_format(model.classes, options["top"] or 1, every)
        rows = labels.predict_labels(model, parts)
    return row_format, view.report_progress(rows, done)
