"""A finished run as a classifier, from its directory alone."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from razorctl import devices, hub, models
from razorctl.errors import MissingError, OutOfMemoryError, UsageError
from razorctl.job import Job
from razorctl.step import autocast, precision
from razorctl.training import rundir
from razorctl.training.evaluation import evaluate
from razorctl.training.loading import in_order, moved

if TYPE_CHECKING:
    from datasets import Dataset

    from razorctl.data.own.stream import Stream
    from razorctl.data.own.whole import Part
    from razorctl.training.labeled import Labeled

CHOICES = ("best", "last")


@dataclass(frozen=True)
class Classifier:
    """A model with its classes and the way to feed it.

    weights: the file they are from. result: that of the run, under the keys of `finetune --json`.
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
        """The name of each class, in the order of the probabilities."""
        return tuple(self.result["classes"])

    def evaluate(
        self, rows: "Dataset | Stream", done: Callable[[int], None] = lambda _: None
    ) -> dict[str, float]:
        """The figures of `evaluation.evaluate` for rows with labels, such as `Labeled` has.

        done: is told how many rows have been read.
        """

        def batches() -> Iterator[tuple[Any, Tensor]]:
            read = 0
            for batch in self._batches(rows):
                yield batch["inputs"], batch["labels"]
                read += len(batch["labels"])
                done(read)

        make = self.family.sequences
        if make is not None:
            # By what the run has saved, as the model it began with may be gone.
            make = models.find(str(self.weights.parent), self.job.task).sequences
            assert make is not None
            rows = make(rows, self.job.input_size, lambda _: None)
        with self._in_memory():
            logits = self.family.logits
            return evaluate(self.model, logits, batches(), len(self.classes), self.job)

    @torch.no_grad()
    def probabilities(self, rows: "Dataset") -> Iterator[Tensor]:
        """The probabilities [rows, classes] of each batch of rows, on the CPU.

        A row has an `image`, or a `text` and perhaps a `text_pair`.
        """
        self.model.eval()
        with self._in_memory():
            for batch in self._batches(rows):
                with autocast(self.device, self.job):
                    logits = self.family.logits(self.model, batch["inputs"])
                yield logits.float().softmax(-1).cpu()

    def _batches(self, rows: "Dataset | Stream") -> Iterator[dict[str, Any]]:
        for batch in in_order(rows.with_transform(self.transform), self.job, self.device):
            yield moved(batch, self.device)

    @contextmanager
    def _in_memory(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise OutOfMemoryError(
                f"a batch of {self.job.batch_size} does not fit into the memory of "
                f"{devices.name(self.device)}; lower --batch-size, or choose --device cpu."
            ) from None


@dataclass(frozen=True)
class Prediction:
    """What a classifier makes of a row of a file; `row` is None for an image file."""

    file: str
    row: int | None
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]

    def ranked(self, top: int) -> list[tuple[str, float]]:
        """The `top` most probable classes with their probabilities; of equal ones the first."""
        pairs = zip(self.classes, self.probabilities, strict=True)
        return sorted(pairs, key=lambda pair: -pair[1])[:top]


def load(
    run: Path | str,
    *,
    weights: str | None = None,
    device: torch.device | str | None = None,
    batch_size: int | None = None,
) -> Classifier:
    """The classifier that a finished run is; nothing but its directory is read.

    weights: `best` or `last`; None is the best. They are those of the best and of the last
        evaluation during training, which may be the same.
    device: None is CUDA if available, else the CPU. batch_size: None is a micro-batch of the run.
    Raises UsageError if the directory holds no finished run, MissingError if its weights are not
    there, and DataError if its files cannot be read.
    """
    run = Path(run)
    if weights not in (None, *CHOICES):
        raise UsageError(f"unknown weights {weights!r}; choose one of {', '.join(CHOICES)}.")
    result, job = rundir.finished(run)
    file = run / (rundir.BEST if weights != "last" and _has_best(result) else rundir.WEIGHTS)
    family, place = models.find(job.model, job.task), devices.find(device)
    if not file.exists():
        raise MissingError(f"{file} is missing; {rundir.AGAIN}.")
    with hub.reading(str(file), file.parent, rundir.AGAIN):
        model, transform = family.load(file.parent, job.input_size)
    size = batch_size or job.micro_batch
    job = replace(job, batch_size=size, accumulate=1, processes=1, precision=_precision(job, place))
    return Classifier(run, file, result, job, family, model.to(place).eval(), transform, place)


def _has_best(result: Mapping[str, Any]) -> bool:
    """Whether the best weights are not the last."""
    return bool(result["best_step"] != result["steps"])


def _precision(job: Job, device: torch.device) -> Any:
    """The precision of the run, or fp32 if the device does not have that."""
    try:
        return precision(job, device)
    except UsageError:
        return "fp32"


def evaluated(
    classifier: Classifier, found: "Labeled", dataset: str, done: Callable[[int], None]
) -> dict[str, Any]:
    """The figures of a classifier on rows, under the stable keys of `evaluate --json`.

    dataset: what the rows are of. done: is told how many have been read.
    """
    start, read = time.perf_counter(), 0

    def counted(rows: int) -> None:
        nonlocal read
        read = rows
        done(rows)

    figures = classifier.evaluate(found.rows, counted)
    return {
        "run_dir": str(classifier.run),
        "model": classifier.job.model,
        "dataset": dataset,
        "split": found.split,
        "rows": read,
        "skipped": len(found.skipped),
        "weights": str(classifier.weights),
        "device": devices.name(classifier.device),
        "precision": classifier.job.precision,
        "seconds": time.perf_counter() - start,
        "accuracy": figures["accuracy"],
        "loss": figures["loss"],
        "metrics": figures,
    }


def predicted(classifier: Classifier, parts: Iterable["Part"]) -> Iterator[Prediction]:
    """What a classifier makes of the rows of files, in their order, batch by batch."""
    for part in parts:
        places = iter(part.places)
        for batch in classifier.probabilities(part.data):
            for values in batch.tolist():
                yield Prediction(*next(places), classifier.classes, tuple(values))
