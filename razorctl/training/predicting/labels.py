"""The labels that a classifier gives."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from razorctl.step import autocast
from razorctl.training.predicting.inference import check_finite

if TYPE_CHECKING:
    from datasets import Dataset

    from razorctl.data.own.whole import UnlabeledRows
    from razorctl.training.predicting.inference import Trained


@dataclass(frozen=True)
class Prediction:
    """The probabilities of the classes for a row of a file; `row` is None for an image file."""

    file: str
    row: int | None
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]

    def ranked(self, top: int) -> list[tuple[str, float]]:
        """The `top` most probable classes with their probabilities; of equal ones the first."""
        pairs = zip(self.classes, self.probabilities, strict=True)
        return sorted(pairs, key=lambda pair: -pair[1])[:top]


def predict_labels(classifier: "Trained", parts: Iterable["UnlabeledRows"]) -> Iterator[Prediction]:
    """The predictions of a classifier for the rows of files, in their order, batch by batch."""
    for part in parts:
        places = iter(part.places)
        for batch in probabilities(classifier, part.data):
            batch_places = [*islice(places, len(batch))]
            check_finite(batch, batch_places)
            for place, values in zip(batch_places, batch.tolist(), strict=True):
                yield Prediction(*place, classifier.classes, tuple(values))


@torch.no_grad()
def probabilities(classifier: "Trained", rows: "Dataset") -> Iterator[Tensor]:
    """The probabilities [rows, classes] of each batch of rows, on the CPU.

    A row has an `image`, or a `text` and perhaps a `text_pair`.
    """
    with classifier.in_memory():
        for batch in classifier.batches(rows, classifier.transform):
            with autocast(classifier.device, classifier.job):
                logits = classifier.family.logits(classifier.model, batch["inputs"])
            yield logits.float().softmax(-1).cpu()
