"""The functions of the library for finished runs, which the commands of the same names call."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any, Unpack

from razorctl.api import Name
from razorctl.cli import predicting
from razorctl.cli.calls import call, public
from razorctl.cli.results import Result
from razorctl.cli.settings import OF_DATA, Call, of_other_data
from razorctl.cli.views import common as views
from razorctl.cli.views import evaluate as evaluate_view
from razorctl.cli.views import export as export_view
from razorctl.config.keywords import EvaluatedSettings, PredictedSettings
from razorctl.errors import UsageError

if TYPE_CHECKING:
    from razorctl.api import Rows

Run = Name | Result  # a run directory, or the result of `finetune`


@public
def predict(
    run: Run,
    data: "Name | Rows | Sequence[Any]",
    *,
    top: int | None = None,
    probabilities: bool = False,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    threshold: float | None = None,
    draw: Name | None = None,
    out: Name | None = None,
    keep_columns: bool = False,
    weights: str | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    progress: bool = True,
    **settings: Unpack[PredictedSettings],
) -> list[dict[str, Any]]:
    """Predicts labels, texts, vectors, objects or masks with a finished run.

        razorctl.predict("runs/photos", ["a.jpg", "b.jpg"])[0]["label"]

    Args:
        run: directory of a finished run, or the result of `finetune`.
        data: a path or a list of paths, as for the command `predict`; a list of texts, which are
            not paths of files, or of PIL images; a pandas DataFrame, a datasets.Dataset, or a list
            of rows (dicts).
        top: labels of a row, most probable first; None is 1.
        probabilities: whether rows have the probability of every class.
        max_new_tokens: most new tokens of a text; None is 64.
        temperature: of sampling; None is 0, the most probable token.
        seed: of sampling; None is 0.
        threshold: least score of an object; None is 0.5.
        draw: new directory for images with their boxes.
        out: new directory for masks.
        keep_columns: whether each row has `columns`, all columns of its table.
        weights: "best" or "last" of the run's evaluations; None is the best.
        batch_size: examples in a batch; None is the run's.
        device, progress: as for `finetune`.
        settings: for reading the data; bad rows are refused unless `skip_bad`.

    Returns:
        A dict for each row with the fields of `predict --json`; for detection one for each image,
        with its `objects`. `row` counts from 0; `file` is None for data in memory.

    Raises:
        UsageError: a setting that cannot be used; ArgumentTypeError for data of another type.
        DataError: bad rows.
    """
    given: dict[str, Any] = {
        "top": top,
        "probabilities": probabilities,
        "max_new_tokens": max_new_tokens,
    }
    given |= {"temperature": temperature, "seed": seed, "threshold": threshold}
    options = {**given, "draw": _path(draw), "out": _path(out), "keep_columns": keep_columns}
    chosen = [name for name, value in options.items() if value not in (None, False)]
    job = predicting.checked_job(_run(run), options, chosen)
    if out is not None and job.task != "segmentation":
        raise UsageError(
            f"out is a directory for masks, and {_run(run)} predicts none; leave it out."
        )
    this = call(settings, batch_size=batch_size)
    with predicting.files_of(data, job) as (files, lines, named):
        read = predicting.read(this, _run(run), files, lines, weights, device)
        with predicting.predictions(read, options, by_image=True) as (row_format, rows):
            found = [dict(row_format.entry(row)) for row in rows]
    return found if named else [{**each, "file": None} for each in found]


@public
def evaluate(
    run: Run,
    data: "Name | Rows | None" = None,
    *,
    split: str | None = None,
    weights: str | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    progress: bool = True,
    **settings: Unpack[EvaluatedSettings],
) -> Result:
    """Evaluates a finished run on data, or on what it was evaluated on, like `razorctl evaluate`.

        razorctl.evaluate("runs/photos")["metrics"]

    Args:
        run, weights, batch_size, device, progress: as for `predict`.
        data: as for `finetune`, with labels; None is the data of the run.
        split: split to evaluate; None is the one that the run was evaluated on, or else the test
            split, the validation split, or all rows.
        settings: for reading the data.

    Returns:
        The keys of `evaluate --json`, such as `result["accuracy"]`.

    Raises:
        UsageError: a setting that cannot be used; ArgumentTypeError for data of another type.
        DataError: bad rows, or labels that are not classes of the run.
    """
    from razorctl.data.own import in_memory

    this = call(settings, split=split, batch_size=batch_size)
    if data is None or isinstance(data, (str, os.PathLike)):
        dataset = None if data is None else os.fspath(data)
        document = _evaluated(this, _run(run), dataset, weights, device)
    else:
        with in_memory.lent(data) as file:
            document = _evaluated(this, _run(run), str(file), weights, device)
        document["dataset"] = in_memory.NAME
    return Result(document, evaluate_view.show)


@public
def export(
    run: Run,
    to: str = "safetensors",
    out: Name | None = None,
    *,
    push_to_hub: str | None = None,
    private: bool = False,
    weights: str | None = None,
    llama_cpp: Name | None = None,
    dry_run: bool = False,
    progress: bool = True,
) -> Result:
    """Exports the model of a finished run for other tools, like `razorctl export`.

        razorctl.export("runs/photos", "onnx")["out"]

    Args:
        run, weights, progress: as for `predict`.
        to: "safetensors", the files of the model's own library, "onnx", or "gguf" of a causal-lm.
        out: new directory; None is RUN-FORMAT beside the run, unless it is pushed.
        push_to_hub: repository ORG/NAME of the hub to write.
        private: whether a new repository is private.
        llama_cpp: folder of llama.cpp, which writes GGUF; None finds its script on PATH.
        dry_run: export, but keep nothing; the result has the model card.

    Returns:
        The keys of `export --json`: `result["out"]`, and `result["files"]` with their bytes.

    Raises:
        UsageError: a format that the model cannot have, or a directory that exists.
        MissingError: llama.cpp's script is missing.
    """
    document = _exported(
        _run(run), to, _path(out), push_to_hub, private, weights, _path(llama_cpp), dry_run
    )
    return Result(document, export_view.show)


def _run(run: Run) -> Path:
    return Path(run["run_dir"] if isinstance(run, Result) else run)


def _path(name: Name | None) -> Path | None:
    return None if name is None else Path(name)


def _evaluated(
    call: Call, run: Path, dataset: str | None, weights: str | None, device: str | None
) -> dict[str, Any]:
    """The document of `evaluate --json`; the arguments are as in `evaluate`."""
    from razorctl import data
    from razorctl.cli import progress
    from razorctl.training import evaluation_rows, run_files

    given = call.explicit.given
    columns = [name for name in OF_DATA if name in given]
    if dataset is None and columns:
        flag = columns[0].replace("_", "-")
        raise UsageError(f"--{flag} is for reading DATASET; name DATASET, or leave it out.")
    _, job = run_files.finished_run(run)
    reading = {"validation": None, "max_rows": None, "split": None, **of_other_data(given)}
    of_data = replace(job, dataset=dataset or job.dataset, **reading)
    with views.status(f"loading {of_data.dataset}") as at:
        if dataset is None:
            rows = evaluation_rows.rows_of_run(run, given.get("split"), at)
        else:
            rows = evaluation_rows.rows_of_job(run, of_data, given.get("split"), at)
        at(f"loading {run}")
        from razorctl.training.predicting import inference

        model = inference.load(
            run, weights=weights, device=device, batch_size=given.get("batch_size")
        )
    if dataset is not None and data.place(dataset) == job.dataset and rows.split is None:
        views.note(
            f"{run} was trained on {dataset}; leave it out to evaluate on the rows that were held "
            "out."
        )
    evaluate_view.note_skipped(rows.skipped)
    with progress.count_rows(f"evaluating {model.weights}", len(rows.rows)) as done:
        return inference.evaluation_document(model, rows, of_data.dataset, done)


def _exported(
    run: Path,
    to: str,
    out: Path | None,
    push_to_hub: str | None,
    private: bool,
    weights: str | None,
    llama_cpp: Path | None,
    dry_run: bool,
) -> dict[str, Any]:
    """The document of `export --json`; the arguments are as in `export`."""
    from razorctl.system import hub
    from razorctl.training import run_files
    from razorctl.training.exporting import formats

    _, job = run_files.finished_run(run)
    formats.check_format(to, run, job.task)
    converter = formats.converter(run, llama_cpp) if to == "gguf" else []
    if private and push_to_hub is None:
        raise UsageError("--private is for --push-to-hub; name a repository, or leave it out.")
    if push_to_hub is None and out is None:
        named = run if run.name not in ("", "..") else run.resolve()
        out = named.with_name(f"{named.name}-{to}")
    if push_to_hub is not None:
        hub.check_name(push_to_hub)
    with views.status(f"loading {run}") as at, _folder(None if dry_run else out) as folder:
        if push_to_hub is not None and not dry_run:
            hub.check_access(push_to_hub)
        from razorctl.training.exporting import folder as exporting
        from razorctl.training.predicting import inference

        trained = inference.load(run, weights=weights, device="cpu")
        at(f"exporting {run}")
        name = push_to_hub or ("" if out is None else out.name)
        writes = out is not None and not dry_run
        files, graph = exporting.write(trained, to, folder, name, converter, copy=writes)
        document = {
            "run_dir": str(run),
            "model": job.model,
            "weights": str(trained.weights),
            "format": to,
            "out": str(out) if writes else None,
            "files": {each: file.stat().st_size for each, file in files.items()},
            "onnx": graph,
            "repository": push_to_hub,
            "url": None,
            "card": files["README.md"].read_text("utf-8") if dry_run else None,
        }
        if push_to_hub is not None and not dry_run:
            at(f"writing {push_to_hub}")
            document["url"] = hub.push(files, push_to_hub, private, exporting.title(trained))
    return document


def _folder(out: Path | None) -> AbstractContextManager[Path]:
    """A folder that is renamed to `out` when the block succeeds; None: a temporary folder."""
    from razorctl.system import atomic

    return atomic.scratch(Path(gettempdir())) if out is None else atomic.atomic_folder(out)
