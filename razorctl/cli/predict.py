"""`razorctl predict`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from razorctl import models
from razorctl.cli.options import Batch, Device, Finished, Json, Weights, option, takes
from razorctl.cli.settings import told
from razorctl.cli.views import common as views
from razorctl.cli.views import evaluate as evaluation
from razorctl.cli.views import predict as view
from razorctl.data.own import whole
from razorctl.errors import DataError, UsageError
from razorctl.training import rundir

COLUMNS = ("image_column", "text_column", "skip_bad")


@takes(*COLUMNS)
def predict(
    ctx: typer.Context,
    run: Finished,
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILES",
            help="Images, folders of images, tables, .txt files, or - for stdin.",
            show_default=False,
        ),
    ],
    top: Annotated[
        int | None, option(help="Labels of a row, from the most probable. [default: 1]", min=1)
    ] = None,
    probabilities: Annotated[
        bool, option("--probabilities", help="Give the probability of every class, too.")
    ] = False,
    out: Annotated[Path | None, option(help="New file to write. [default: stdout]")] = None,
    weights: Weights = None,
    batch_size: Batch = None,
    device: Device = None,
    json: Json = False,
    **flags: Any,
) -> None:
    """Predict the labels of FILES with a finished RUN.

    Models of images take images, folders, which are walked, and tables with
    images or their paths. Models of texts take tables with texts, and .txt
    files with a text on each line. Tables are CSV, TSV, JSONL or Parquet.
    A dash stands for the lines of stdin: texts, or paths of images.

    The output is CSV with the columns file, row, label and probability. The row
    is counted from 0, and empty for an image file. --top 3 adds the columns
    label_2, probability_2, label_3 and probability_3. --probabilities adds one
    for each class, such as p_cat. --json gives a document with the same.
    """
    from razorctl.cli import progress  # imported here: it loads rich's bars, which slow --help

    given = told(ctx, {**flags, "batch_size": batch_size}).given
    if out is not None:
        rundir.check_room(out, "--out")
    _, job = rundir.finished(run)
    if not job.classifies:
        own = "transformers" if job.task != "segmentation" else "its library"
        raise UsageError(
            f"predict gives labels, and {run} is for {job.task}; load it with {own}, or name a run "
            "for classification."
        )
    plain = {"image_column": None, "text_column": None, "skip_bad": False}
    job = replace(job, **{name: given.get(name, value) for name, value in plain.items()})
    with views.waiting("reading the files") as at:
        modality = models.named(job.model).modality
        parts, skipped = whole.unlabeled(files, job, modality, _stdin(files), at)
        at(f"loading {run}")
        from razorctl.training import inference

        found = inference.load(
            run, weights=weights, device=device, batch_size=given.get("batch_size")
        )
    evaluation.skipped(skipped)
    total = sum(len(part.kept) for part in parts)
    rows = inference.predicted(found, parts)
    document = {
        "run_dir": str(run),
        "model": job.model,
        "weights": str(found.weights),
        "classes": [*found.classes],
        "skipped": [*skipped],
    }
    writer = view.json if json else view.csv
    with _opened(out) as stream, progress.counting("predicting", total) as done:
        writer(stream, document, view.counted(rows, done), top or 1, probabilities)


def _stdin(files: list[str]) -> list[str]:
    """The lines of stdin, if it is among the files."""
    if files.count("-") > 1:
        raise UsageError("- stands for stdin, which can be read only once; name it once.")
    if "-" not in files:
        return []
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise DataError("stdin is not UTF-8; convert it.") from None


@contextmanager
def _opened(out: Path | None) -> Iterator[TextIO]:
    """Stdout, or a file that is there when the block has succeeded."""
    if out is None:
        try:
            yield sys.stdout
            sys.stdout.flush()
        except BrokenPipeError:  # its reader, such as `head`, has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        return
    with rundir.whole(out) as partial, partial.open("w", encoding="utf-8", newline="") as stream:
        yield stream
