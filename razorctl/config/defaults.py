"""Defaults for user data, computed from its number of rows.

A model's defaults are for the data of its paper: 20,000 steps are 51 epochs of CIFAR-100, and
13,474 epochs of 190 images. So for user data and unregistered data sets of the hub, the values here
replace a model's steps, epochs, warmup and evaluations. None of them is measured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Task or modality -> pairs (most training rows, epochs). Rows of language models are blocks of
# tokens, or conversations.
EPOCHS: Mapping[str, Sequence[tuple[float, float]]] = {
    "classification of images": ((1000, 30), (5000, 20), (50_000, 10), (500_000, 5), (math.inf, 3)),
    "classification of texts": ((1000, 10), (10_000, 5), (math.inf, 3)),
    "segmentation": ((100, 100), (1000, 50), (10_000, 30), (100_000, 10), (math.inf, 5)),
    "embedding": ((1000, 10), (10_000, 5), (math.inf, 3)),
    "causal-lm": ((100_000, 3), (math.inf, 1)),
    "masked-lm": ((1000, 10), (100_000, 3), (math.inf, 1)),
}
MANY = 100  # epochs; a run of more gets a note
SMALL = 8  # least batch for few rows
PARTS = 8  # least batches of an epoch, unless a batch is SMALL
FEWEST, MOST = 5, 20  # evaluations of a run
FROM_SCRATCH = 3  # times the epochs for pretrained weights


@dataclass(frozen=True)
class ByRows:
    """The defaults of a data set.

    Args:
        validated: whether it has a validation split.
        evaluated: rows of the split that is evaluated during training; None if unknown.
        times: factor of the usual epochs.
    """

    task: str
    modality: str
    validated: bool = False
    evaluated: int | None = None
    times: float = 1

    @property
    def table(self) -> Sequence[tuple[float, float]]:
        """Pairs (most training rows, epochs)."""
        usual = EPOCHS[f"classification of {self.modality}s"]
        return EPOCHS.get(self.task, usual)

    def epochs(self, rows: int) -> float:
        """Epochs for this number of training rows."""
        return self.times * next(epochs for most, epochs in self.table if rows <= most)

    def batch_size(self, usual: int, rows: int) -> int:
        """A model's usual batch size, or a smaller one, so that an epoch has PARTS batches."""
        fitting = 1 << max(0, (rows // PARTS).bit_length() - 1)  # a power of two
        return min(usual, max(SMALL, fitting))

    def evaluate_every(self, steps: int, per_epoch: int, batch_size: int) -> int:
        """Steps between evaluations: an epoch, or other steps for FEWEST to MOST evaluations.

        All evaluations together read at most as many rows as training, which takes three times as
        long for a row.
        """
        passes, most = steps / per_epoch, MOST
        if self.evaluated:
            most = max(1, min(MOST, steps * batch_size // self.evaluated))
        if passes < FEWEST <= most:
            return math.ceil(per_epoch / math.ceil(FEWEST / passes))
        return per_epoch * math.ceil(passes / most)

    def patience(self, evaluations: int) -> int | None:
        """Half of the evaluations: late ones, at a low learning rate, are often the best.

        None without a validation split, since a test split must not decide when to stop.
        """
        return max(3, math.ceil(evaluations / 2)) if self.validated else None


def whole_batch(usual: int, rows: int | None, multiple: int) -> int:
    """The largest batch of at most `usual` and `rows` examples that `multiple` divides.

    It is at least `multiple`.
    """
    most = usual if rows is None else min(usual, rows)
    return max(multiple, most // multiple * multiple)
