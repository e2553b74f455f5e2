"""The disk space of a run."""

import math
import shutil
from pathlib import Path

from torch import nn

from razorctl import units
from razorctl.config.job import Job
from razorctl.errors import RazorError
from razorctl.training import tensors
from razorctl.training.checkpoints import Checkpoints

REST = 1 << 20  # bytes of all but weights: metrics, random states, draws


def needed(model: nn.Module, job: Job) -> int:
    """The most bytes that checkpoints and weights of a resolved job take at once.

    Beside a checkpoint that is written, there are the newest and the best one.
    """
    assert job.steps is not None
    assert job.evaluate_every is not None
    weights = tensors.nbytes(model.state_dict())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    moments = int(job.momentum > 0) if job.optimizer == "sgd" else 2
    checkpoint = weights + moments * trained + REST
    if job.ema is not None:
        checkpoint += weights
    if job.steps <= min(job.evaluate_every, job.save_every or job.steps):  # one checkpoint
        return checkpoint + weights
    return 2 * checkpoint + max(checkpoint, 2 * weights)


def check_space(out: Path, model: nn.Module, job: Job, checkpoints: Checkpoints) -> None:
    """Raises RazorError if the disk of a run directory lacks space for the files of the run."""
    lacking = needed(model, job) - checkpoints.size
    free = shutil.disk_usage(out).free
    if lacking > free:
        need, room = units.size(lacking, math.ceil), units.size(free, math.floor)
        raise RazorError(
            f"the checkpoints and weights of this run need {need}, and the disk of {out} has "
            f"{room} free; free some, or name a directory elsewhere with --out."
        )
