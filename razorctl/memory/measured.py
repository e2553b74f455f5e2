"""Measured bytes, on a CPU and on CUDA."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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


@contextmanager
def snapshot(path: Path) -> Iterator[None]:
    """Records the CUDA allocations of the block to a file for https://pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history()
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
