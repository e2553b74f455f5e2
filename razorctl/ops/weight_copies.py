"""int8 copies of weights, shared by the micro-batches of a step, which change no weight.

Only on a card: there one kernel computes the copy together with other operands, and it is small
beside the saved bytes. On a CPU there are none.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from razorctl.ops.kernels import fused

Columns = tuple[Tensor, Tensor]  # what `ops.int8.int8_columns` returns

# id of a weight -> the weight, its version, and its copy; None outside `shared_by`. Global, not
# thread-local, since the backward pass may run in another thread.
_copies: dict[int, tuple[weakref.ref[Tensor], int, Columns]] | None = None


@contextmanager
def shared_by(micro_batches: int) -> Iterator[None]:
    """Inside the block, micro-batches share a copy of each weight; a single one shares nothing."""
    global _copies
    before, _copies = _copies, {} if micro_batches > 1 else None
    try:
        yield
    finally:
        _copies = before


def find(weight: Tensor | None) -> Columns | None:
    """The copy of a weight, if there is one and the weight has not changed since."""
    if weight is None or torch.compiler.is_compiling() or not _copies:
        return None
    reference, version, columns = _copies.get(id(weight), (None, 0, None))
    current = reference and reference() is weight and version == weight._version
    return columns if current else None


def keep(weight: Tensor, columns: Columns | None) -> None:
    """Stores the copy of a weight inside `shared_by`."""
    if columns is None or torch.compiler.is_compiling() or _copies is None:
        return
    if fused(weight.device):
        _copies[id(weight)] = weakref.ref(weight), weight._version, columns
