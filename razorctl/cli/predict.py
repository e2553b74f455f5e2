"""`razorctl predict`."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

import typer

from razorctl.cli.options import (
    Batch,
    Device,
    Draw,
    Json,
    RunArgument,
    Threshold,
    Weights,
    argument,
    option,
    switch,
    with_options,
)
from razorctl.cli.settings import Call, is_given, of_other_data
from razorctl.cli.views import common as views
from razorctl.cli.views import evaluate as evaluation
from razorctl.cli.views import predict as view
from razorctl.cli.views.terminal import data_stream
from razorctl.errors import DataError, UsageError

# Functions below import what --help does not need.
if TYPE_CHECKING:
    from razorctl.config.job import Job
    from razorctl.data.own.whole import UnlabeledRows
    from razorctl.training.predicting.inference import Trained

COLUMNS = ("image_column", "text_column", "skip_bad")
NEW_TOKENS = 64
# Option -> the tasks that it applies to.
TASK_OPTIONS = {
    "top": ("classification",),
    "probabilities": ("classification", "multi-label"),
    **dict.fromkeys(("max_new_tokens", "temperature", "seed"), ("causal-lm",)),
    **dict.fromkeys(("threshold", "draw"), ("detection",)),
}
FIRST = (
    *("top", "probabilities", "max_new_tokens", "temperature", "seed", "out"),
    *("weights", "batch_size", "device", "json", "spreadsheet"),
)


@with_options(*COLUMNS, first=FIRST)
def predict(
    ctx: typer.Context,
    run: RunArgument,
    files: Annotated[
        list[str],
        argument("Images, folders of images, tables, .txt files, or - for stdin.", "FILES"),
    ],
    top: Annotated[
        int | None, option("Labels of a row, most probable first.", "1", "N", min=1)
    ] = None,
    probabilities: Annotated[
        bool, switch("--probabilities", "Add the probability of every class.")
    ] = False,
    max_new_tokens: Annotated[
        int | None, option("Most new tokens of a text.", str(NEW_TOKENS), "N", min=1)
    ] = None,
    temperature: Annotated[
        float | None,
        option("Temperature of sampling; 0 takes the most probable token.", "0", "T", min=0),
    ] = None,
    seed: Annotated[int | None, option("Seed of sampling.", "0", "N", min=0, max=2**32 - 1)] = None,
    threshold: Threshold = None,
    draw: Draw = None,
    out: Annotated[
        Path | None, option("New file to write; for masks, a new directory.", "stdout", "FILE")
    ] = None,
    weights: Weights = None,
    batch_size: Batch = None,
    device: Device = None,
    json: Json = False,
    spreadsheet: Annotated[
        bool,
        switch("--spreadsheet", "Write ' before cells that a spreadsheet would run (= + - @)."),
    ] = False,
    **flags: Any,
) -> None:
    """Predict labels, texts or masks of FILES with a finished RUN.

        razorctl predict runs/photos new/ > labels.csv

    Models of images take images, folders with images at any depth, and tables
    with images or their paths. Models of texts take tables with texts, and .txt
    files with a text on each line. Tables are CSV, TSV, JSON, JSONL, Parquet or
    CoNLL. A dash stands for the lines of stdin: texts, or paths of images.
    Labels, masks and empty lines are skipped, so FILES may be training data.

    The output is CSV, or one document with --json. Its first columns are file and
    row; rows are counted from 0, and an image file has none.

    Classification: label and probability. --top 3 adds the columns label_2,
    probability_2, label_3 and probability_3. --probabilities adds a column for
    each class, such as p_cat.

    Regression: value. Multi-label: labels of a probability of 1/2 or more, with |
    between them; --probabilities adds a column for each. Token-classification:
    tokens and tags, with spaces between them; texts are split at spaces.

    causal-lm: the text that follows a text, or the answer to a conversation or
    an instruction; an answer at the end of a conversation is ignored.

    Embedding: the vector of each text, or of each image of a model of both, of norm
    1. --out vectors.npy writes them as an array of NumPy.

    Detection: a line for each object, with its label, score and box in pixels:
    left, top, right and bottom. The document of --json is one of COCO, with a
    score in each annotation. --draw DIR also writes the images with their boxes.

    Segmentation: the directory --out gets a mask for each image, which is a PNG
    of the same name and size whose values are numbers of classes, and classes.txt
    with their names, from number 0 on. The output has the path of each mask, and its most
    frequent label with the share of its pixels.
    """
    from razorctl import models
    from razorctl.cli import progress
    from razorctl.data.own import whole
    from razorctl.training import run_files

    given = Call.typed(ctx, **flags, batch_size=batch_size).explicit.given
    _, trained = run_files.finished_run(run)
    _check_task(ctx, run, trained, out)
    job = replace(trained, **of_other_data(given))
    with views.status("reading the files") as at:
        modality = models.named(job.model).modality
        white = run_files.read_split(run).get("white")
        lines = _stdin(files)
        parts, skipped = whole.unlabeled(files, job, modality, lines, at, white, trained)
        at(f"loading {run}")
        model = _loaded(run, weights, device, given.get("batch_size"))
    evaluation.note_skipped(skipped)
    file = None if job.task == "segmentation" else out
    total = sum(len(part.good) for part in parts)
    with _opened(file) as stream, progress.count_rows("predicting", total) as done:
        row_format, rows = _predictions(model, parts, ctx.params, done)
        document = _document(model, skipped) if json else None
        _writer(out, document, spreadsheet, job.task)(stream, rows, row_format)


def _loaded(
    run: Path, weights: str | None, device: str | None, batch_size: int | None
) -> "Trained":
    from razorctl.training.predicting import inference

    return inference.load(run, weights=weights, device=device, batch_size=batch_size)


def _predictions(
    model: "Trained",
    parts: list["UnlabeledRows"],
    options: Mapping[str, Any],
    done: Callable[[int], None],
) -> tuple[view.RowFormat, Iterable[Any]]:
    """The format and the rows of a model's predictions; rows are predicted as they are read.

    Args:
        model: the model of the run.
        parts: the rows of files.
        options: the parameters of the command.
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
        found = rows if options["json"] else (one for row in rows for one in row.objects)
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


def _writer(
    out: Path | None, document: Mapping[str, Any] | None, spreadsheet: bool, task: str | None
) -> Callable[..., None]:
    """The function that writes rows; document: of JSON, None without it."""
    if document is not None:
        write = view.write_coco if task == "detection" else view.write_json
        return partial(write, document=document)
    return view.write_array if _is_array(out) else partial(view.write_csv, spreadsheet=spreadsheet)


def _document(model: "Trained", skipped: Sequence[str]) -> dict[str, Any]:
    """The document of `predict` without its predictions."""
    return {
        "run_dir": str(model.run),
        "model": model.job.model,
        "weights": str(model.weights),
        "classes": list(model.classes),
        "skipped": list(skipped),
    }


def _check_task(ctx: typer.Context, run: Path, job: "Job", out: Path | None) -> None:
    """Raises UsageError for a task without predictions, and for an option of another task."""
    task = job.task or "classification"
    if task == "masked-lm":
        raise UsageError(
            f"{run} is for masked-lm, which continues no texts; fill masks with transformers' "
            f"pipeline('fill-mask', '{run}'), or name a run for another task."
        )
    for name, tasks in TASK_OPTIONS.items():
        if task not in tasks and is_given(ctx, name, ["COMMANDLINE"]):
            flag = name.replace("_", "-")
            raise UsageError(
                f"--{flag} is for {' and '.join(tasks)}, and {run} is for {task}; leave it out."
            )
    if _is_array(out) and (task != "embedding" or ctx.params["json"]):
        raise UsageError(
            f"{out} would be an array of NumPy, which has vectors of an embedding alone; name "
            "another file."
        )
    if task == "segmentation" and out is None:
        raise UsageError(f"{run} predicts masks; name a new directory for them with --out.")
    if out is not None:
        _check_out(out, task == "segmentation")
    if (draw := ctx.params["draw"]) is not None:
        _check_out(draw, folder=True)


def _is_array(out: Path | None) -> TypeGuard[Path]:
    """Whether a file to write is an array of NumPy, by its ending."""
    return out is not None and out.suffix.casefold() == ".npy"


def _stdin(files: list[str]) -> list[str]:
    """The lines of stdin, if it is among the files."""
    if files.count("-") > 1:
        raise UsageError("- is stdin, which can be read only once; name it once.")
    if "-" not in files:
        return []
    if sys.stdin is None:
        raise UsageError("stdin is closed; give the command its lines, or name files.")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise DataError("stdin is not UTF-8; convert it.") from None


def _check_out(out: Path, folder: bool) -> None:
    """Raises UsageError if `out` exists or cannot be made; folder: whether it is a folder."""
    from razorctl.system import atomic

    if not folder:
        atomic.check_room(out, "--out")
        return
    with atomic.writing(out):
        with atomic.atomic_folder(out):
            pass
        out.rmdir()


@contextmanager
def _opened(out: Path | None) -> Iterator[Any]:
    """Yields stdout, or a file that is renamed to `out` when the block succeeds."""
    if out is None:
        stream = data_stream()
        yield stream
        stream.flush()
        return
    from razorctl.system import atomic

    with (
        atomic.writing(out, "file"),
        atomic.atomic_file(out) as path,
        path.open("wb") if _is_array(out) else path.open("w", encoding="utf-8", newline="") as file,
    ):
        yield file
