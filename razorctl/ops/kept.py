"""int8 copies of weights, which the micro-batches of a step share: until it ends no weight changes.

Only on a card: there the copy is made with other operands, and is small beside what waits for the
backward pass. On a CPU nothing is kept.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from razorctl.ops.kernels import fused

Columns = tuple[Tensor, Tensor]  # what `ops.int8.int8_columns` returns

# By the identity of a weight: the weight, its version, and its copy. None where nothing is kept;
# the backward pass may run in a thread of its own.
_kept: dict[int, tuple[weakref.ref[Tensor], int, Columns]] | None = None


@contextmanager
def shared_by(micro_batches: int) -> Iterator[None]:
    """Inside, so many micro-batches make one copy of a weight; nothing is kept for a single one."""
    global _kept
    before, _kept = _kept, {} if micro_batches > 1 else None
    try:
        yield
    finally:
        _kept = before


def find(weight: Tensor | None) -> Columns | None:
    """The copy of a weight, if there is one and the weight has not changed since."""
    if weight is None or torch.compiler.is_compiling() or not _kept:
        return None
    known, version, columns = _kept.get(id(weight), (None, 0, None))
    return columns if known and known() is weight and version == weight._version else None


def keep(weight: Tensor, columns: Columns | None) -> None:
    """Keeps the copy of a weight inside `shared_by`."""
    if columns is None or torch.compiler.is_compiling() or _kept is None:
        return
    if fused(weight.device):
        _kept[id(weight)] = weakref.ref(weight), weight._version, columns
