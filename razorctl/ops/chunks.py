"""Splits a tensor into parts, so that temporaries of an operation stay small."""

from typing import NamedTuple

import torch
from torch import Tensor

ELEMENTS = 2**22  # of a part at most, and so of a temporary
CACHED = {"cpu": 2**17}  # elements per thread that stay in its cache


class RowPart(NamedTuple):
    """Some rows of an activation: whole tiles of equal length, or a part of one tile."""

    rows: slice
    tiles: slice


def in_cache(x: Tensor) -> bool:
    """Whether parts of `x` should stay in a core's cache; elsewhere each part costs launches."""
    return x.device.type in CACHED


def _rows(device: torch.device, columns: int) -> int:
    """Rows of a part: about ELEMENTS elements, or on a device in CACHED so many per thread."""
    cached = CACHED.get(device.type)
    most = ELEMENTS if cached is None else cached * torch.get_num_threads()
    return max(1, most // max(1, columns))


def chunks(x: Tensor) -> list[slice]:
    """Slices of rows that cover `x` [rows, columns]."""
    size = _rows(x.device, x.shape[1])
    return [slice(start, start + size) for start in range(0, len(x), size)]


def parts(rows: int, columns: int, tile_rows: int, device: torch.device) -> list[RowPart]:
    """Parts that cover an activation with tiles of `tile_rows` rows; the last may be shorter."""
    most, whole = _rows(device, columns), rows // tile_rows
    if tile_rows > most:
        return [
            RowPart(slice(start, min(start + most, tile + tile_rows, rows)), slice(i, i + 1))
            for i, tile in enumerate(range(0, rows, tile_rows))
            for start in range(tile, min(tile + tile_rows, rows), most)
        ]
    count = most // tile_rows
    groups = [(first, min(first + count, whole)) for first in range(0, whole, count)]
    covering = [RowPart(slice(a * tile_rows, b * tile_rows), slice(a, b)) for a, b in groups]
    if whole * tile_rows < rows:
        covering.append(RowPart(slice(whole * tile_rows, rows), slice(whole, whole + 1)))
    return covering
