"""`razorctl predict`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeGuard

import typer

from razorctl.cli.options import (
    Batch,
    Device,
    Draw,
    DrawSeed,
    Json,
    NewTokens,
    RunArgument,
    Temperature,
    Threshold,
    Weights,
    argument,
    option,
    switch,
    with_options,
)
from razorctl.cli.settings import Call, is_given
from razorctl.cli.views import predict as view
from razorctl.cli.views.terminal import data_stream, stdin_lines
from razorctl.errors import UsageError

# Functions below import what --help does not need.
if TYPE_CHECKING:
    from razorctl.training.predicting.inference import Trained

COLUMNS = ("column", "image_column", "text_column", "skip_bad")
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
        int | None, option("Number of labels for a row, most probable first.", "1", "N", min=1)
    ] = None,
    probabilities: Annotated[
        bool, switch("--probabilities", "Add the probability of every class.")
    ] = False,
    max_new_tokens: NewTokens = None,
    temperature: Temperature = None,
    seed: DrawSeed = None,
    threshold: Threshold = None,
    draw: Draw = None,
    out: Annotated[
        Path | None, option("New file to write; for masks, a new directory.", "stdout", "FILE")
    ] = None,
    keep_columns: Annotated[
        bool,
        switch(
            "--keep-columns",
            "Add all columns of the tables among FILES.",
            rich_help_panel="Your own data",
        ),
    ] = False,
    weights: Weights = None,
    batch_size: Batch = None,
    device: Device = None,
    json: Json = False,
    spreadsheet: Annotated[
        bool,
        switch(
            "--spreadsheet",
            "Write ' before cells that a spreadsheet would run as formulas (= + - @).",
        ),
    ] = False,
    **flags: Any,
) -> None:
    """Predict labels, texts, boxes, vectors or masks for FILES with a finished RUN.

        razorctl predict runs/photos new/ > labels.csv

    Image models take images, folders with images at any depth, and tables with
    images or their paths. Text models take tables with texts, and .txt files with
    a text on each line. Tables are CSV, TSV, JSON, JSONL, Parquet or CoNLL. A dash
    reads texts or paths of images from stdin, one on each line. Labels, masks and
    empty lines are skipped, so FILES may be training data.

    The output is CSV, or one document with --json. Its first columns are file and
    row. Rows count from 0; the row of an image file is empty.

    --keep-columns adds the columns of a table after file and row, with the names of
    images in place of their contents. A column with the name of an output column
    becomes input_NAME, such as input_label. With --json each row has an object,
    columns, with the names of the table.

    Classification: label and probability. --top 3 adds the columns label_2,
    probability_2, label_3 and probability_3. --probabilities adds a column for
    each class, such as p_cat.

    Regression: value. Multi-label: all labels with a probability of at least 1/2,
    separated by |; --probabilities adds a column for each. Token-classification:
    tokens and tags, with spaces between them; texts are split at spaces.

    causal-lm: the continuation of a text, or the answer to a conversation or an
    instruction; an answer at the end of a conversation is ignored.

    Embedding: a vector of norm 1 for each text, or for each image with a model of
    images and texts. --out vectors.npy writes the vectors as a NumPy array.

    Detection: a line for each object, with its label, score and box in pixels:
    left, top, right and bottom. --json prints COCO annotations with a score each.
    --draw DIR also writes the images with their boxes.

    Segmentation: the directory --out gets a mask for each image: a PNG of the same
    name and size, whose values are class numbers. classes.txt there has the names
    of the classes, from number 0 on. The output has the path of each mask, and its
    most frequent label with the share of its pixels.
    """
    from razorctl.cli import predicting

    options = {name: ctx.params[name] for name in predicting.OPTIONS}
    typed = [name for name in options if is_given(ctx, name, ["COMMANDLINE"])]
    task = predicting.checked_job(run, options, typed).task
    file = None if task == "segmentation" else out
    _check_output(file, task, json, keep_columns)
    call = Call.typed(ctx, **flags, batch_size=batch_size)
    data = predicting.read(call, run, files, _stdin(files), weights, device)
    document = _document(data.model, data.skipped) if json else None
    with (
        _opened(file) as stream,
        predicting.predictions(data, options, by_image=json) as (row_format, rows),
    ):
        _writer(out, document, spreadsheet, task)(stream, rows, row_format)


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


def _check_output(out: Path | None, task: str | None, json: bool, keep_columns: bool) -> None:
    """Raises UsageError for a file that cannot be written, and for a form without such rows."""
    from razorctl.system import atomic

    if _is_array(out) and (task != "embedding" or json):
        raise UsageError(
            f"{out} would be a NumPy array, which only embeddings can be written to; name another "
            "file."
        )
    if keep_columns and (_is_array(out) or (json and task == "detection")):
        what = "COCO annotations have" if json else "a NumPy array has"
        raise UsageError(f"{what} no other columns; leave --keep-columns out, or write CSV.")
    if out is not None:
        atomic.check_room(out, "--out")


def _is_array(out: Path | None) -> TypeGuard[Path]:
    """Whether a file to write is an array of NumPy, by its ending."""
    return out is not None and out.suffix.casefold() == ".npy"


def _stdin(files: list[str]) -> list[str]:
    """The lines of stdin, if it is among the files."""
    if files.count("-") > 1:
        raise UsageError("- is stdin, which can be read only once; name it once.")
    return [*stdin_lines()] if "-" in files else []


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
