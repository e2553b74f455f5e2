"""The state of a run, from which its summary, its result and the values of trackers are made."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from razorctl.errors import RazorError
from razorctl.job import Job
from razorctl.recipe import Recipe
from razorctl.training import rundir
from razorctl.training.checkpoints import Checkpoint, Checkpoints
from razorctl.training.compiled import Trial
from razorctl.training.evaluation import evaluate
from razorctl.training.feed import Feed
from razorctl.training.metrics import Metrics, Step, waited
from razorctl.training.recovery import Recovery

if TYPE_CHECKING:
    from filelock import BaseFileLock


class Record:
    """The state of a run, and its evaluation.

    command: resumes the run. held: the identity of its directory, for which `lock` is held.
    metric: the figure by which the best weights are chosen.
    usual_epochs: the default for as many rows; None if their number is not known.
    saved_bytes, full_saved_bytes: bytes that this run and full fine-tuning keep for backward.
    stock: a sentence on layers that are not compressed and keep a large share; else empty.
    history: the steps so far, also those before the run was resumed.
    tested: figures of the last weights on the test split, if it is not the one of `history`.
    best_figures: figures of the best weights.
    checksums: of the weights in its directory, when the run is finished.
    """

    job: Job
    recipe: Recipe
    out: Path
    device: torch.device
    command: str
    lock: "BaseFileLock | None"
    held: Any
    predicted: dict[str, Any] | None
    classes: tuple[str, ...]
    metric: str
    usual_epochs: float | None
    model: nn.Module
    logits: Callable[[nn.Module, Any], Tensor]
    feed: Feed
    recovery: Recovery
    trial: Trial
    checkpoints: Checkpoints
    metrics: Metrics | None
    full_saved_bytes: int
    saved_bytes: int
    stock: str
    peak_bytes: int | None
    history: list[Step]
    tested: Mapping[str, float] | None
    best_figures: Mapping[str, float]
    checksums: dict[str, dict[str, int]]

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of whole batches in the training data; None if it is not known."""
        return self.feed.loading.steps_per_epoch

    @property
    def stopped_early(self) -> bool:
        """Whether the best evaluation is as many evaluations ago as the job is patient for."""
        patience = self.job.patience or math.inf
        return waited(self.history, self.metric) >= patience

    def best(self) -> Checkpoint | None:
        """The best checkpoint; None if the last step is at least as good."""
        best, last = self.checkpoints.best, self.history[-1].score(self.metric)
        if best is None or best.score is None or last is None:
            return None
        return best if best.score > last else None

    def check_directory(self) -> None:
        """Raises RazorError if the run directory is not the one that was locked any more."""
        if self.lock is None or not self.lock.is_locked:
            return
        if rundir.identity(self.out) != self.held:
            newest = self.checkpoints.newest
            saved = f"step {newest.step:,} is saved in it" if newest else "no step is saved in it"
            raise RazorError(
                f"{self.out} is not the directory of this run any more: that was moved, removed or "
                f"replaced, and {saved}; put it back, then go on with `{self.command}`."
            )

    def evaluate(self, rows: DataLoader[Any] | None = None) -> dict[str, float]:
        """The figures of `evaluation.evaluate` for rows.

        None is the split that is evaluated during training: validation if there is one, else test.
        """
        batches = map(self.feed.moved, self.feed.evaluated if rows is None else rows)
        return evaluate(self.model, self.logits, batches, len(self.classes), self.job)
