import pytest
import torch

from razorctl.ops.op import FewBitCopy
from razorctl.ops.packing import BITS, pack, packed_bytes, packed_of, unpack, unpacked

every_width = pytest.mark.parametrize("bits", BITS)
# Rows of whole groups are packed each by itself, others all together.
SHAPES = [(1, 1), (6, 7), (9, 33), (15, 64), (7, 192), (0, 5), (0, 64)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def numbers(shape: tuple[int, int], bits: int, device: torch.device) -> torch.Tensor:
    return torch.randint(2**bits, shape, dtype=torch.uint8, device=device)


@every_width
@every_shape
@pytest.mark.parametrize("cached", [{"cpu": 130}, {}], ids=["in cache", "whole"])
def test_there_and_back(shape, bits, cached, device, monkeypatch):
    want = numbers(shape, bits, device)
    packed = pack(want, bits)
    assert packed.shape == (packed_bytes(*shape, bits),)
    exact = want.numel() * bits / 8
    if shape[1] % 64 == 0:
        assert packed.numel() == exact
    assert exact <= packed.numel() <= exact + 8 * bits
    assert torch.equal(unpack(packed, bits, *shape), want)

    monkeypatch.setattr("razorctl.ops.chunks.CACHED", cached)
    monkeypatch.setattr("razorctl.ops.chunks.ELEMENTS", 130)
    x = torch.empty(shape, device=device)
    for tile_rows in (1, 2, 4, 100):
        got = packed_of(x, bits, tile_rows, lambda part: want[part.rows])
        assert torch.equal(got, packed)
        parts = torch.full_like(want, 255)
        scale = x.new_empty(1, shape[1])
        copy = FewBitCopy(packed, scale, scale, bits, tile_rows)
        for part, codes in unpacked(copy, shape[0]):
            parts[part.rows] = codes
        assert torch.equal(parts, want)


@every_width
def test_a_row_is_packed_by_itself(bits, device):
    want = numbers((6, 128), bits, device)
    lines = pack(want, bits).view(6, -1)
    for line, row in zip(lines, want.view(6, 1, 128), strict=True):
        assert torch.equal(line, pack(row, bits))


def test_naive_twin_of_four_bits(device):
    """Code i of a row of 128 shares a byte with code i + 64."""
    want = numbers((1, 128), 4, device).flatten()
    low, high = want.view(2, 64)
    assert torch.equal(pack(want.view(1, 128), 4), low + 16 * high)
