"""The labels of classifiers, and the numbers of regressions."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from razorctl.step import scored
from razorctl.training.predicting.inference import RowOfFile, check_finite

if TYPE_CHECKING:
    from datasets import Dataset

    from razorctl.data.own.whole import UnlabeledRows
    from razorctl.training.predicting.inference import Trained

HALF = 0.5  # least probability of a label that a row has


@dataclass(frozen=True)
class Prediction(RowOfFile):
    """The probabilities of the classes."""

    classes: tuple[str, ...]
    probabilities: tuple[float, ...]

    def ranked(self, top: int) -> list[tuple[str, float]]:
        """The `top` most probable classes with their probabilities; equal ones in their order."""
        pairs = zip(self.classes, self.probabilities, strict=True)
        return sorted(pairs, key=lambda pair: -pair[1])[:top]


def predict_labels(classifier: "Trained", parts: Iterable["UnlabeledRows"]) -> Iterator[Prediction]:
    """The predictions of a classifier for the rows of files, in their order."""
    for place, logits in placed_logits(classifier, parts):
        yield Prediction(*place, classifier.classes, tuple(logits.softmax(-1).tolist()))


@dataclass(frozen=True)
class LabelSet(RowOfFile):
    """The probability of each label, and the labels of a probability of HALF or more."""

    labels: tuple[str, ...]
    probabilities: Mapping[str, float]


def predict_several(trained: "Trained", parts: Iterable["UnlabeledRows"]) -> Iterator[LabelSet]:
    """The labels of a multi-label model for the rows of files, in their order."""
    for place, logits in placed_logits(trained, parts):
        chances = dict(zip(trained.classes, logits.sigmoid().tolist(), strict=True))
        yield LabelSet(*place, tuple(name for name, p in chances.items() if p >= HALF), chances)


@dataclass(frozen=True)
class Estimate(RowOfFile):
    """The number of a regression."""

    value: float


def predict_numbers(trained: "Trained", parts: Iterable["UnlabeledRows"]) -> Iterator[Estimate]:
    """The numbers of a regression for the rows of files, in their order."""
    for place, logits in placed_logits(trained, parts):
        yield Estimate(*place, logits.item())


@torch.no_grad()
def logits_of(trained: "Trained", rows: "Dataset") -> Iterator[Tensor]:
    """The logits [rows, classes] of each batch of rows, fp32, on the CPU.

    A row has an `image`, or a `text` and optionally a `text_pair`.
    """
    with trained.in_memory():
        for batch in trained.batches(rows, trained.transform):
            with scored(trained.device, trained.job):
                logits = trained.family.logits(trained.model, batch["inputs"])
            yield logits.float().cpu()


def placed_logits(
    trained: "Trained", parts: Iterable["UnlabeledRows"]
) -> Iterator[tuple[tuple[str, int | None], Tensor]]:
    """The place and the logits of each row of files; raises DataError for NaN and infinity."""
    for part in parts:
        places = iter(part.places)
        for batch in logits_of(trained, part.data):
            batch_places = [*islice(places, len(batch))]
            check_finite(batch, batch_places)
            yield from zip(batch_places, batch, strict=True)
