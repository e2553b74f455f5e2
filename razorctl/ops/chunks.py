"""Parts of a tensor small enough that an operation's temporaries do not count."""

import torch
from torch import Tensor

ELEMENTS = 2**22  # of a part: the bound on temporaries
CACHED = {"cpu": 2**17}  # of a thread's share of a part, where it is to stay in a core's cache


def in_cache(x: Tensor) -> bool:
    """Whether parts of `x` are to stay in a core's cache; elsewhere each costs its launches."""
    return x.device.type in CACHED


def chunks(x: Tensor, width: int | None = None) -> list[tuple[slice, ...]]:
    """Indices that cover `x` [..., rows, columns], along its first dimension if it has three.

    A part holds about ELEMENTS, where threads have a cache of their own about CACHED elements a
    thread, and whole rows. width: columns that an operation makes of those of x, if others.
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


def _slices(count: int, step: int) -> list[tuple[slice, ...]]:
    step = max(1, step)
    return [(slice(start, start + step),) for start in range(0, count, step)]
