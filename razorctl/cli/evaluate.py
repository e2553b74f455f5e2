"""`razorctl evaluate`."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from razorctl.cli.options import (
    DATASET,
    Batch,
    Device,
    Json,
    RunArgument,
    Weights,
    option,
    with_options,
)
from razorctl.cli.results import print_result
from razorctl.cli.settings import OF_DATA, Call, of_other_data
from razorctl.cli.views import common as views
from razorctl.cli.views import evaluate as view
from razorctl.errors import UsageError


@with_options(*OF_DATA, first=("split", "weights", "batch_size", "device", "json"))
def evaluate(
    ctx: typer.Context,
    run: RunArgument,
    dataset: Annotated[str | None, DATASET] = None,
    split: Annotated[
        str | None, option("Split to evaluate.", "the one that the run was evaluated on", "NAME")
    ] = None,
    weights: Weights = None,
    batch_size: Batch = None,
    device: Device = None,
    json: Json = False,
    **flags: Any,
) -> None:
    """Evaluate a finished RUN on DATASET, or on the data it was trained on.

        razorctl evaluate runs/photos

    Without DATASET, the rows are those that the run itself was evaluated on: its
    test or validation split, or the rows that were held out. With DATASET, they
    are its test split, else its validation split, else all its rows. Labels are
    matched to the classes of the run by name.

    The weights are the best ones of the run, by its evaluations during training.
    --weights last gives the figures of the run's result.json.
    """
    from razorctl import data
    from razorctl.cli import progress
    from razorctl.training import evaluation_rows, run_files

    given = Call.typed(ctx, **flags, split=split, batch_size=batch_size).explicit.given
    columns = [name for name in OF_DATA if name in given]
    if dataset is None and columns:
        flag = columns[0].replace("_", "-")
        raise UsageError(f"--{flag} is for reading DATASET; name DATASET, or leave it out.")
    _, job = run_files.finished_run(run)
    reading = {"validation": None, "split": None, **of_other_data(given)}
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
        result = inference.evaluation_document(model, rows, of_data.dataset, done)
    print_result(ctx, result, view.show)
