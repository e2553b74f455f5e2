"""The model of a finished run, from its directory alone."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from razorctl import models
from razorctl.config.job import Job
from razorctl.config.tasks import LANGUAGE
from razorctl.errors import DataError, MissingError, OutOfMemoryError, UsageError
from razorctl.models.transformers.pretrained_files import INDEX, SETTINGS, WEIGHTS
from razorctl.step import precision
from razorctl.system import devices, hub
from razorctl.training import run_files, rundir
from razorctl.training.evaluation import Evaluation, evaluate
from razorctl.training.loading import in_order, moved

if TYPE_CHECKING:
    from datasets import Dataset

    from razorctl.training.evaluation_rows import LabeledRows

CHOICES = ("best", "last")


@dataclass(frozen=True)
class RowOfFile:
    """The place of a prediction; row: counted from 0, None if the file is one row."""

    file: str
    row: int | None


@dataclass(frozen=True)
class Trained:
    """The model of a finished run, with its classes and the transform of its inputs.

    weights: their file. result: of the run, under the keys of `finetune --json`.
    """

    run: Path
    weights: Path
    result: Mapping[str, Any]
    job: Job
    family: models.Model
    model: nn.Module
    transform: Any
    device: torch.device

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class, in the order of the logits; empty for a language model."""
        return tuple(self.result["classes"])

    def evaluate(self, rows: "Dataset", done: Callable[[int], None] = lambda _: None) -> Evaluation:
        """The evaluation of labeled rows; done: called with the number of rows so far."""
        count = 0

        def logits(model: nn.Module, inputs: Any) -> Tensor:
            values = self.family.logits(model, inputs)
            check_finite(values, [("what is evaluated", count + row) for row in range(len(values))])
            return values

        def batches() -> Iterator[tuple[Any, Tensor]]:
            nonlocal count
            for batch in self.batches(rows, self.transform):
                yield batch["inputs"], batch["labels"]
                count += len(batch["labels"])
                done(count)

        if self.job.task in LANGUAGE:
            # From the weights of the run, since its pretrained model may be deleted.
            family = models.of_job(replace(self.job, model=str(self.weights.parent)))
            rows = family.sequences(rows, self.job.input_size, lambda _: None)
        with self.in_memory():
            losses = replace(self.family.losses(self.job), logits=logits)
            return evaluate(self.model, losses, batches(), self.classes)

    def batches(self, rows: "Dataset", transform: Any) -> Iterator[dict[str, Any]]:
        """The batches of transformed rows, on the device."""
        for batch in in_order(rows.with_transform(transform), self.job, self.device):
            yield moved(batch, self.device)

    @contextmanager
    def in_memory(self) -> Iterator[None]:
        """Raises OutOfMemoryError, with a mend, if the block runs out of memory."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise OutOfMemoryError(
                f"a batch of {self.job.batch_size} does not fit into the memory of "
                f"{devices.name(self.device)}; lower --batch-size, or choose --device cpu."
            ) from None


def load(
    run: Path | str,
    *,
    weights: str | None = None,
    device: torch.device | str | None = None,
    batch_size: int | None = None,
) -> Trained:
    """The model of a finished run, in eval mode; reads only the run directory.

    Raises UsageError without a finished run, MissingError for missing weights, and DataError for
    files that cannot be read.

    Args:
        run: the run directory.
        weights: "best" or "last" of the evaluations during training; None is "best".
        device: None is CUDA if available, else the CPU.
        batch_size: None is a micro-batch of the run.
    """
    run = Path(run)
    if weights not in (None, *CHOICES):
        raise UsageError(f"unknown weights {weights!r}; choose one of {', '.join(CHOICES)}.")
    result, job = run_files.finished_run(run)
    file = run / _file(result, weights or "best")
    family = models.of_job(replace(job, packing=None))  # texts are answered one by one
    place = devices.find(device)
    if not file.exists():
        raise MissingError(f"{file} is missing; {rundir.AGAIN}.")
    run_files.check_files(run, result, _loaded(run, file, result))
    with hub.reading(str(file), file.parent, rundir.AGAIN):
        model, transform = family.load(file.parent, job.input_size)
    _check_finite(model, file)
    size = batch_size or job.micro_batch
    job = replace(job, batch_size=size, accumulate=1, processes=1, workers=None)
    job = replace(job, precision=_precision(job, place))
    return Trained(run, file, result, job, family, model.to(place).eval(), transform, place)


def check_finite(logits: Tensor, places: Sequence[tuple[str, int | None]]) -> None:
    """Raises DataError that names the first row of logits [rows, ...] with NaN or infinity.

    places: the file of each row, and its number there; None if the file is one row.
    """
    least, most = logits.detach().flatten(1).aminmax(dim=1)
    bad = (~(least.isfinite() & most.isfinite())).nonzero()
    if len(bad):
        file, row = places[int(bad[0])]
        where = file if row is None else f"row {row} of {file}"
        raise DataError(
            f"the model's logits of {where} are not finite; check that row, or train again."
        )


def _check_finite(model: nn.Module, file: Path) -> None:
    """Raises DataError that names a weight with NaN or infinity, or a buffer with NaN."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise DataError(f"{name} in {file} is not finite; {rundir.AGAIN}.")
    for name, buffer in model.named_buffers():
        if buffer.isnan().any():
            raise DataError(f"{name} in {file} is not finite; {rundir.AGAIN}.")


def _loaded(run: Path, weights: Path, result: Mapping[str, Any]) -> list[str]:
    """The paths, in a run, of the files that are loaded with its weights, also of missing ones."""
    folder = weights.parent
    files = [file for each in (*SETTINGS, WEIGHTS, INDEX) for file in sorted(folder.glob(each))]
    checked = (run / name for name in result["checksums"] if name != rundir.METRICS)
    files += [*(file for file in checked if file.parent == folder), run / rundir.SPLIT]
    return list(dict.fromkeys(file.relative_to(run).as_posix() for file in files))


def _file(result: Mapping[str, Any], weights: str) -> str:
    """The path of the best or the last weights in the directory of a run."""
    if result["best_step"] == result["steps"]:
        return rundir.WEIGHTS
    return rundir.WEIGHTS if weights == "best" else rundir.LAST


def _precision(job: Job, device: torch.device) -> Any:
    """The precision of the run, or fp32 if the device does not have it."""
    try:
        return precision(job, device)
    except UsageError:
        return "fp32"


def evaluation_document(
    trained: Trained, labeled: "LabeledRows", dataset: str, done: Callable[[int], None]
) -> dict[str, Any]:
    """The figures of a run's model on rows, under the stable keys of `evaluate --json`.

    dataset: the name of the data set. done: called with the number of rows so far.
    """
    start, count = time.perf_counter(), 0

    def note(rows: int) -> None:
        nonlocal count
        count = rows
        done(rows)

    evaluation = trained.evaluate(labeled.rows, note)
    figures = evaluation.figures
    return {
        "run_dir": str(trained.run),
        "model": trained.job.model,
        "dataset": dataset,
        "split": labeled.split,
        "rows": count,
        "skipped": len(labeled.skipped),
        "weights": str(trained.weights),
        "device": devices.name(trained.device),
        "precision": trained.job.precision,
        "seconds": time.perf_counter() - start,
        "accuracy": figures.get("accuracy"),
        "loss": figures["loss"],
        "metrics": figures,
        "classes": list(trained.classes),
        "by_class": evaluation.by_class_document,
    }
