"""Measured bytes on CUDA."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def snapshot(path: Path) -> Iterator[None]:
    """Records the CUDA allocations of the block to a file for https://pytorch.org/memory_viz."""
    torch.cuda.memory._record_memory_history()
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
