"""A job's training step on fake tensors: no weights, no data and no device are needed."""

from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from razorctl import families, memory
from razorctl.job import Job
from razorctl.promise import sparsify_within
from razorctl.recipe import Recipe
from razorctl.step import DTYPES, autocast, build_optimizer, train_step
from razorctl.traces import Trace

# What autocast computes in single precision on CUDA, but not on the CPU, among what layers call.
SINGLE = (
    *(torch.softmax, Tensor.softmax, F.softmax),
    *(torch.log_softmax, Tensor.log_softmax, F.log_softmax),
    *(F.layer_norm, F.group_norm),
)


class _CudaAutocast(TorchFunctionMode):
    """Inside it, autocast on the CPU casts as it does on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SINGLE and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(Tensor, Tensor.float, (args, kwargs))
        return func(*args, **kwargs)


@cache
def _blueprint(name: str, classes: int, input_size: int | None) -> tuple[nn.Module, FakeTensorMode]:
    """A model of fake parameters of their true sizes, and the mode to make such tensors in."""
    with torch.device("meta"):
        model = families.find(name).bare(classes, input_size)
    return model, memory.fake(model)


def trace(job: Job, recipe: Recipe, classes: int, device: str = "cuda") -> Trace:
    """A step of a resolved job as `finetune` takes it on a kind of device, with a recipe.

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
    optimizer = partial(build_optimizer, job=job)
    with torch.random.fork_rng(devices=[]), nullcontext() if device == "cpu" else _CudaAutocast():
        sparsify_within(model, recipe, inputs, autocast=DTYPES[job.precision])
        return memory.trace(model, batch, optimizer, step, forward, micro_batches=job.accumulate)
