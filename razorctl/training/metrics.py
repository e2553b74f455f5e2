"""The steps of a run, and metrics.jsonl, which has a line of JSON for each.

A line that cannot be written, as on a full disk, is written later.
"""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from razorctl.config.tasks import LEAST
from razorctl.system import documents
from razorctl.system.atomic import atomic_file
from razorctl.training.rundir import METRICS

log = logging.getLogger(__name__)

MOST = 100  # classes of a confusion matrix


@dataclass(frozen=True)
class Step:
    """One optimizer step; `accuracy`, `test_loss` and `metrics` are None unless it was evaluated.

    These figures are of the validation split, else of the test split; `metrics` has all of them.
    """

    step: int
    epoch: float
    loss: float
    learning_rate: float
    grad_norm: float
    seconds: float
    samples_per_second: float
    accuracy: float | None = None
    test_loss: float | None = None
    metrics: Mapping[str, float] | None = None

    def score(self, metric: str) -> float | None:
        """A figure of the evaluation, the higher the better; None without an evaluation."""
        if self.metrics is None:
            return None
        return -self.metrics[metric] if metric in LEAST else self.metrics[metric]


@dataclass(frozen=True)
class ByClass:
    """The figures of each class, in the order of the classes.

    labels: the number of rows, pixels or objects. confusion: [label][guess] counts; None for more
    than MOST classes. average_precision: of objects; None for other tasks.
    """

    labels: Sequence[int]
    precision: Sequence[float]
    recall: Sequence[float]
    f1: Sequence[float]
    confusion: Sequence[Sequence[int]] | None
    average_precision: Sequence[float] | None = None

    def __post_init__(self) -> None:
        matrix, classes = self.confusion, len(self.labels)
        sizes = {len(self.precision), len(self.recall), len(self.f1)}
        if matrix is not None:
            sizes |= {len(matrix), *map(len, matrix)}
        if sizes != {classes}:
            raise ValueError("its figures are not of as many classes")


def waited(steps: Sequence[Step], metric: str) -> int:
    """The number of evaluations since the best one."""
    scores = [score for step in steps if (score := step.score(metric)) is not None]
    return len(scores) - 1 - scores.index(max(scores)) if scores else 0


class Metrics:
    """Adds steps to the metrics of a run."""

    def __init__(self, out: Path, steps: Iterable[Step] = ()) -> None:
        """Writes a new file with `steps`; raises OSError if that fails."""
        lines = b"".join(_line(step) for step in steps)
        with atomic_file(out / METRICS, replace=True) as file:
            file.write_bytes(lines)
        self._file = (out / METRICS).open("r+b", buffering=0)
        self._size, self._rest = len(lines), b""

    def add(self, step: Step) -> None:
        """Writes a step; a line that cannot be written waits, and the first one gives a warning."""
        lagged, self._rest = bool(self._rest), self._rest + _line(step)
        try:
            self._flush()
        except OSError as error:
            if not lagged:
                log.warning("%s lags behind (%s); training continues.", METRICS, error.strerror)

    def close(self) -> None:
        """Writes the waiting lines; raises OSError if that fails."""
        if not self._file.closed:
            self._flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def _flush(self) -> None:
        """Writes all waiting lines, or none."""
        try:
            self._file.seek(self._size)
            done = 0
            while done < len(self._rest):
                done += self._file.write(self._rest[done:])
        except OSError:
            os.truncate(self._file.fileno(), self._size)
            raise
        self._size, self._rest = self._size + len(self._rest), b""


def _line(step: Step) -> bytes:
    return f"{documents.text(asdict(step))}\n".encode()
