"""Codes of 2 to 8 bits, packed into bytes.

Each row is packed by itself. If its length is not a multiple of 64 codes, the whole tensor is
packed as one line. The codes in one byte come from equal parts of the line, such as its two halves.
So every operation runs over long ranges, eight bytes at once.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from razorctl.ops.chunks import RowPart, in_cache, parts
from razorctl.ops.op import FewBitCopy

BITS = (8, 6, 5, 4, 3, 2)
# A code is split into these widths, lowest bits first; each of them packs into whole bytes.
PLANES = {8: (8,), 6: (4, 2), 5: (4, 1), 4: (4,), 3: (2, 1), 2: (2,)}
WORD = 8  # bytes that are packed at once
GROUP = WORD**2  # lines are padded to multiples of so many codes


def _lines(rows: int, columns: int) -> tuple[int, int]:
    """The number of lines that are packed separately (the rows, or one), and codes per line."""
    return (rows, columns) if columns % GROUP == 0 else (1, rows * columns)


def packed_bytes(rows: int, columns: int, bits: int) -> int:
    """The size of `pack`'s result for codes [rows, columns]."""
    count, width = _lines(rows, columns)
    return count * (width if bits == 8 else -(-width // GROUP) * WORD * bits)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [rows, columns] below 2 ** bits -> uint8 [packed_bytes]."""
    count, width = _lines(codes.shape[0], codes.shape[1])
    lines = codes.contiguous().view(count, width)
    if bits == 8 or not codes.numel():
        return lines.reshape(-1)
    if missing := -width % GROUP:
        lines = F.pad(lines, (0, missing))
    words = lines.view(torch.int64)
    packed = words.new_empty(count, words.shape[1] // WORD * bits)
    start = shift = 0
    for planes in PLANES[bits]:
        plane = words if planes == bits else (words >> shift) & _in_each_byte(2**planes - 1)
        first, second, *others = plane.view(count, WORD // planes, -1).unbind(1)
        out = packed[:, start : start + first.shape[1]]
        torch.bitwise_or(first, second << planes, out=out)
        for i, part in enumerate(others, start=2):
            out |= part << i * planes
        start, shift = start + first.shape[1], shift + planes
    return packed.view(torch.uint8).view(-1)


def unpack(packed: Tensor, bits: int, rows: int, columns: int) -> Tensor:
    """The inverse of `pack`: uint8 codes [rows, columns]; a view if bits is 8."""
    count, width = _lines(rows, columns)
    if bits == 8 or not packed.numel():
        return packed.view(rows, columns)
    words, codes = packed.view(torch.int64).view(count, -1), None
    size, start, shift = words.shape[1] // bits, 0, 0
    for planes in PLANES[bits]:
        plane = words[:, start : start + size * planes]
        spread = words.new_empty(count, WORD // planes, size * planes)
        for i, part in enumerate(spread.unbind(1)):
            by = i * planes - shift
            moved = plane if by == 0 else plane >> by if by > 0 else plane << -by
            torch.bitwise_and(moved, _in_each_byte(2**planes - 1 << shift), out=part)
        spread = spread.view(count, -1)
        codes = spread if codes is None else codes.bitwise_or_(spread)
        start, shift = start + size * planes, shift + planes
    assert codes is not None
    return codes.view(torch.uint8)[:, :width].reshape(rows, columns)


def packed_of(x: Tensor, bits: int, tile_rows: int, codes: Callable[[RowPart], Tensor]) -> Tensor:
    """`pack` of codes of `x`, computed part by part.

    Args:
        x: [rows, columns].
        bits: Bits of a code.
        tile_rows: Rows of a tile.
        codes: One of `chunks.parts` -> the codes of its rows, uint8.
    """
    pieces = parts(len(x), x.shape[1], tile_rows, x.device)
    if x.shape[1] % GROUP or not in_cache(x):
        whole = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
        for part in pieces:
            whole[part.rows] = codes(part)
        return pack(whole, bits)
    lines = x.new_empty(len(x), x.shape[1] * bits // WORD, dtype=torch.uint8)
    for part in pieces:
        out = lines[part.rows]
        out.copy_(pack(codes(part), bits).view(out.shape))
    return lines.view(-1)


def unpacked(copy: FewBitCopy, rows: int) -> Iterator[tuple[RowPart, Tensor]]:
    """Each of the `chunks.parts` of a copy, with its codes."""
    packed, bits, columns = copy.packed, copy.bits, copy.scale.shape[1]
    pieces = parts(rows, columns, copy.tile_rows, packed.device)
    if columns % GROUP or not in_cache(packed):
        codes = unpack(packed, bits, rows, columns)
        for part in pieces:
            yield part, codes[part.rows]
        return
    lines = packed.view(rows, columns * bits // WORD)
    for part in pieces:
        some = lines[part.rows]
        yield part, unpack(some.reshape(-1), bits, len(some), columns)


def _in_each_byte(mask: int) -> int:
    """A word that has `mask`, of at most 7 bits, in each byte."""
    return mask * 0x0101010101010101
