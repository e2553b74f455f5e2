"""Highest bytes of a training step, traced on fake tensors or measured on a CPU."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from razorctl.memory.saved import run_forward
from razorctl.memory.tracker import trace_step


def peak_bytes(
    model: nn.Module,
    inputs: Any,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
    *,
    autocast: torch.dtype | None = None,
    accumulate: bool = False,
) -> int:
    """Highest bytes of all tensors in a training step; see `trace_step`.

    Raises UsageError if the model needs tensor values.

    Args:
        optimizer: builds an optimizer from parameters; with None the step ends after the backward
            pass.
        accumulate: whether `inputs` are one of several micro-batches of the step.
    """

    def step(model: nn.Module, micro_batches: Iterable[Any], updates: Optimizer | None) -> None:
        for inputs in micro_batches:
            leaves = tree_leaves(run_forward(model, inputs, autocast))
            loss = next(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad)
            torch.autograd.backward(loss.float().sum())
        if updates is not None:
            updates.step()

    def build(model: nn.Module) -> Optimizer:
        assert optimizer is not None
        return optimizer(p for p in model.parameters() if p.requires_grad)

    def forward(model: nn.Module, inputs: Any) -> Any:
        return run_forward(model, inputs, autocast)

    micro_batches = 2 if accumulate else 1
    return trace_step(
        model, inputs, build if optimizer else None, step, forward, micro_batches=micro_batches
    ).peak


def allocated_on_cpu(run: Callable[[], object]) -> int:
    """Highest bytes that `run` has allocated on the CPU at a time, kernels' workspaces included."""
    now = most = 0
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        run()
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most
