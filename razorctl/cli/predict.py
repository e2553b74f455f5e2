"""`razorctl predict`."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from razorctl.cli.options import Batch, Device, Finished, Json, Weights, option, with_options
from razorctl.cli.settings import call_settings
from razorctl.cli.views import common as views
from razorctl.cli.views import evaluate as evaluation
from razorctl.cli.views import predict as view
from razorctl.cli.views.terminal import data_stream
from razorctl.errors import DataError, UsageError

# Imported here is what --help needs, and the rest in the functions below.
if TYPE_CHECKING:
    from razorctl.data.own.whole import Part
    from razorctl.job import Job
    from razorctl.training.predicting.inference import Trained

Done = Callable[[int], None]  # is told how many rows are done
Made = tuple[view.RowFormat, Iterable[Any]]
COLUMNS = ("image_column", "text_column", "skip_bad")
NEW_TOKENS = 64
# Option -> the task that it is for.
OF_TASK = {
    **dict.fromkeys(("top", "probabilities"), "classification"),
    **dict.fromkeys(("max_new_tokens", "temperature", "seed"), "causal-lm"),
}


FIRST = (
    *("top", "probabilities", "max_new_tokens", "temperature", "seed", "out"),
    *("weights", "batch_size", "device", "json", "spreadsheet"),
)


@with_options(*COLUMNS, first=FIRST)
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
        int | None,
        option(help="Labels of a row, from the most probable.", default="1", metavar="N", min=1),
    ] = None,
    probabilities: Annotated[
        bool,
        option("--probabilities", help="Give the probability of every class, too.", metavar=""),
    ] = False,
    max_new_tokens: Annotated[
        int | None,
        option(help="Most tokens of a continuation.", default=str(NEW_TOKENS), metavar="N", min=1),
    ] = None,
    temperature: Annotated[
        float | None,
        option(
            help="Draw tokens at it; 0 takes the most probable ones.",
            default="0",
            metavar="T",
            min=0,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        option(help="Seed of drawn tokens.", default="0", metavar="N", min=0, max=2**32 - 1),
    ] = None,
    out: Annotated[
        Path | None,
        option(
            help="New file to write; of masks, new directory.", default="stdout", metavar="FILE"
        ),
    ] = None,
    weights: Weights = None,
    batch_size: Batch = None,
    device: Device = None,
    json: Json = False,
    spreadsheet: Annotated[
        bool,
        option(
            "--spreadsheet",
            help="Write ' before cells that a spreadsheet would run: = + - @.",
            metavar="",
        ),
    ] = False,
    **flags: Any,
) -> None:
    """Predict labels, texts or masks of FILES with a finished RUN.

        razorctl predict runs/photos new/ > labels.csv

    FILES may be what the run was trained on: labels, masks and empty lines are
    passed over. Models of images take images, folders, which are walked, and
    tables with images or their paths. Models of texts take tables with texts,
    and .txt files with a text on each line. Tables are CSV, TSV, JSONL or
    Parquet. A dash stands for the lines of stdin: texts, or paths of images.

    The output is CSV; --json gives a document with the same. Its first columns
    are file and row, which is counted from 0, and empty for an image file.

    A run of classification gives label and probability. --top 3 adds the columns
    label_2, probability_2, label_3 and probability_3. --probabilities adds one
    for each class, such as p_cat.

    A run of causal-lm gives the text that follows a text, or the answer to a
    conversation in the column messages; an answer at its end is not read.

    A run of segmentation writes a mask for each image to the directory --out:
    a PNG of the same name and size, whose values are classes, and classes.txt
    with their names. The output has its path, and the label of the most pixels
    with their share.
    """
    from razorctl import models
    from razorctl.data.own import whole
    from razorctl.training import run_files

    given = call_settings(ctx, {**flags, "batch_size": batch_size}).given
    _, trained = run_files.finished_run(run)
    _check_task(ctx, run, trained, out)
    plain = {"image_column": None, "text_column": None, "label_column": None, "skip_bad": False}
    job = replace(trained, **{name: given.get(name, value) for name, value in plain.items()})
    with views.status("reading the files") as at:
        modality = models.named(job.model).modality
        white = run_files.read_split(run).get("white")
        lines = _stdin(files)
        parts, skipped = whole.unlabeled(files, job, modality, lines, at, white, trained)
        at(f"loading {run}")
        from razorctl.training.predicting import inference

        found = inference.load(
            run, weights=weights, device=device, batch_size=given.get("batch_size")
        )
    evaluation.skipped(skipped)
    if out is not None and job.task == "segmentation":
        making, file = partial(_masks, out), None
    elif job.task == "causal-lm":
        new = max_new_tokens or NEW_TOKENS
        making, file = partial(_texts, new, temperature or 0.0, seed or 0), out
    else:
        making, file = partial(_labels, top or 1, probabilities), out
    _write(found, parts, skipped, making, file, json, spreadsheet)


def _labels(top: int, every: bool, trained: "Trained", parts: list["Part"], done: Done) -> Made:
    from razorctl.training.predicting import labels

    rows = labels.predict_labels(trained, parts)
    return view.labels_format(trained.classes, top, every), view.report_progress(rows, done)


def _texts(
    new: int, temperature: float, seed: int, trained: "Trained", parts: list["Part"], done: Done
) -> Made:
    from razorctl.training.predicting import continuations

    rows = continuations.continue_texts(trained, parts, new, temperature, seed)
    return view.fields_format("file", "row", "text"), view.report_progress(rows, done)


def _masks(out: Path, trained: "Trained", parts: list["Part"], done: Done) -> Made:
    from razorctl.training.predicting import masks

    rows = masks.write_masks(trained, parts, out, done)
    return view.fields_format("file", "row", "mask", "label", "share"), rows


def _write(
    trained: "Trained",
    parts: list["Part"],
    skipped: Sequence[str],
    making: Callable[["Trained", list["Part"], Done], Made],
    file: Path | None,
    json: bool,
    spreadsheet: bool,
) -> None:
    """Makes all predictions, and writes them to a new file, or for None to stdout."""
    from razorctl.cli import progress

    document = {
        "run_dir": str(trained.run),
        "model": trained.job.model,
        "weights": str(trained.weights),
        "classes": [*trained.classes],
        "skipped": [*skipped],
    }
    total = sum(len(part.kept) for part in parts)
    with _opened(file) as stream, progress.counting("predicting", total) as done:
        kind, rows = making(trained, parts, done)
        if json:
            view.json(stream, rows, kind, document)
        else:
            view.csv(stream, rows, kind, spreadsheet)


def _check_task(ctx: typer.Context, run: Path, job: "Job", out: Path | None) -> None:
    """Raises UsageError for a task without predictions, and for options of another one."""
    task = job.task or "classification"
    if task == "masked-lm":
        raise UsageError(
            f"{run} is for masked-lm, which continues no texts; fill masks with transformers' "
            f"pipeline('fill-mask', '{run}'), or name a run for another task."
        )
    for name, own in OF_TASK.items():
        source = ctx.get_parameter_source(name)
        if own != task and source is not None and source.name == "COMMANDLINE":
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} is for {own}, and {run} is for {task}; leave it out.")
    if task == "segmentation" and out is None:
        raise UsageError(f"{run} makes masks; name a new directory for them with --out.")
    if out is not None:
        _check(out, task == "segmentation")


def _stdin(files: list[str]) -> list[str]:
    """The lines of stdin, if it is among the files."""
    if files.count("-") > 1:
        raise UsageError("- stands for stdin, which can be read only once; name it once.")
    if "-" not in files:
        return []
    if sys.stdin is None:
        raise UsageError("stdin is closed; give the command its lines, or name files.")
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise DataError("stdin is not UTF-8; convert it.") from None


def _check(out: Path, folder: bool) -> None:
    """Raises UsageError if a file, or a folder, exists or cannot be made."""
    from razorctl.training import atomic

    if not folder:
        atomic.check_room(out, "--out")
        return
    with atomic.atomic_folder(out):
        pass
    out.rmdir()


@contextmanager
def _opened(out: Path | None) -> Iterator[Any]:
    """Stdout, or a file that is there when the block has succeeded."""
    if out is None:
        try:
            shown = data_stream()
            yield shown
            shown.flush()
        except BrokenPipeError:  # its reader, such as `head`, has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        return
    from razorctl.training import atomic

    with atomic.atomic_file(out) as file, file.open("w", encoding="utf-8", newline="") as stream:
        yield stream
