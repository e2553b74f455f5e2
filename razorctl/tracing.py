"""A job's training step on fake tensors: no weights, no data and no device are needed."""

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from razorctl import families, memory
from razorctl.job import Job
from razorctl.promise import sparsify_within
from razorctl.recipe import Recipe
from razorctl.step import DTYPES, autocast, build_optimizer, train_step
from razorctl.traces import Trace


@cache
def _blueprint(name: str, classes: int, input_size: int | None) -> tuple[nn.Module, FakeTensorMode]:
    """A model of fake parameters of their true sizes, and the mode to make such tensors in."""
    with torch.device("meta"):
        model = families.find(name).bare(classes, input_size)
    return model, memory.fake(model)


def trace(job: Job, recipe: Recipe, classes: int) -> Trace:
    """A step of a resolved job as `finetune` takes it, with a recipe.

    Evaluation needs no more: it runs the same rows through the same layers and saves nothing.
    Raises UsageError for a recipe that the model cannot take.
    """
    family = families.find(job.model)
    model, mode = _blueprint(job.model, classes, job.input_size)
    assert job.batch_size is not None
    rows = job.batch_size // job.accumulate
    with mode:
        inputs = family.example(model, rows, job.input_size)
        batch = inputs, torch.zeros(rows, dtype=torch.long)
    scaler = torch.amp.GradScaler("cpu", enabled=False)  # it would wait for numbers

    def step(model: nn.Module, micro_batches: Iterable[Any], optimizer: Optimizer | None) -> None:
        assert optimizer is not None
        train_step(model, family.logits, micro_batches, optimizer, job, scaler)

    def forward(model: nn.Module, batch: tuple[Any, Tensor]) -> None:
        with autocast(batch[1].device, job):
            family.logits(model, batch[0])

    model = memory.copied(model, mode)  # for adapters, being real, do not merge into fake weights
    with torch.random.fork_rng(devices=[]):
        sparsify_within(model, recipe, inputs, autocast=DTYPES[job.precision])
    optimizer = partial(build_optimizer, job=job)
    return memory.trace(model, batch, optimizer, step, forward, micro_batches=job.accumulate)
