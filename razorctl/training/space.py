"""The disk space of a run, and the memory of its host."""

import math
import shutil
from pathlib import Path

import torch
from torch import nn

from razorctl import units
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import RazorError
from razorctl.models import Model
from razorctl.planning.states import State
from razorctl.surgery import freezing
from razorctl.system import host_memory
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
    trained = [p for p in model.parameters() if p.requires_grad]
    moments = int(job.momentum > 0) if job.optimizer == "sgd" else 2
    state = moments * sum(p.nbytes for p in trained)
    if job.optimizer_state == "host":  # with masters, all in single precision
        state = 12 * sum(p.numel() for p in trained)
    checkpoint = weights + state + REST
    if job.ema is not None:
        checkpoint += weights
    if job.steps <= min(job.evaluate_every, job.save_every or job.steps):  # one checkpoint
        return checkpoint + weights
    return 2 * checkpoint + max(checkpoint, 2 * weights)


def check_host(family: Model, job: Job, recipe: Recipe, classes: int) -> None:
    """Raises RazorError if this machine has no memory for optimizer state on the host."""
    state, room = State.of(job), host_memory.available()
    if not state.on_host or room is None:
        return
    with torch.device("meta"):
        model = family.bare(classes, job.input_size)
    freezing.freeze_weights(model, job, recipe.part)
    need = state.host_bytes(sum(p.numel() for p in model.parameters() if p.requires_grad))
    if need > room:
        raise RazorError(
            f"the optimizer state of {job.model} on the host needs {units.size(need, math.ceil)}, "
            f"and this machine has {units.size(room, math.floor)} free; choose --optimizer "
            "adamw8bit and --optimizer-state card, or free some."
        )


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
