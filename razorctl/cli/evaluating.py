"""An evaluation of a finished run, on its own data or on other ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from razorctl.cli.settings import OF_DATA, Call, of_other_data
from razorctl.cli.views import common as views
from razorctl.cli.views import evaluate as view
from razorctl.errors import UsageError

# Functions below import what --help does not need.


def evaluate(
    call: Call, run: Path, dataset: str | None, weights: str | None, device: str | None
) -> dict[str, Any]:
    """The document of `evaluate --json`; the arguments are as in `finished.evaluate`."""
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
    view.note_skipped(rows.skipped)
    with progress.count_rows(f"evaluating {model.weights}", len(rows.rows)) as done:
        return inference.evaluation_document(model, rows, of_data.dataset, done)
