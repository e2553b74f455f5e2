"""The embeddings of texts and of images."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from razorctl.training.predicting.inference import RowOfFile
from razorctl.training.predicting.labels import placed_logits

if TYPE_CHECKING:
    from razorctl.data.own.whole import UnlabeledRows
    from razorctl.training.predicting.inference import Trained


@dataclass(frozen=True)
class Vector(RowOfFile):
    """The embedding of a text or an image, of norm 1."""

    vector: tuple[float, ...]


def predict_vectors(trained: "Trained", parts: Iterable["UnlabeledRows"]) -> Iterator[Vector]:
    """The embeddings of the rows of files, in their order."""
    for place, vector in placed_logits(trained, parts):
        yield Vector(*place, tuple(vector.tolist()))
