"""Bytes that are measured on a CPU."""

from collections.abc import Callable

import torch


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
