"""Cuts a tensor into parts, so that the temporaries of an operation stay small."""

import torch
from torch import Tensor

ELEMENTS = 2**22  # the most in a part, and so in a temporary
CACHED = {"cpu": 2**17}  # elements for each thread that stay in its cache


def in_cache(x: Tensor) -> bool:
    """Whether parts of `x` are to stay in a core's cache; elsewhere each costs its launches."""
    return x.device.type in CACHED


def chunks(x: Tensor, width: int | None = None) -> list[tuple[slice, ...]]:
    """Indices of parts that cover `x` [rows, columns] or [blocks, rows, columns].

    A part holds whole rows, of one block or of whole blocks: about ELEMENTS elements, or on a
    device in CACHED so many for each thread. width: the number of columns that an operation makes
    of a row of x, if it is another.
    """
    cached = CACHED.get(x.device.type)
    most = ELEMENTS if cached is None else cached * torch.get_num_threads()
    *blocks, rows, columns = x.shape
    columns = width or columns
    if not blocks:
        return _slices(rows, most // max(1, columns))
    whole = _slices(x.shape[0], most // max(1, rows * columns))
    if rows * columns <= most:
        return whole
    return [(*block, *part) for block in whole for part in _slices(rows, most // max(1, columns))]


def _slices(count: int, size: int) -> list[tuple[slice, ...]]:
    size = max(1, size)
    return [(slice(start, start + size),) for start in range(0, count, size)]
