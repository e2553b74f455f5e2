import pytest
import torch

from razorctl.ops.packing import BITS, unpack
from tests import references

TYPES = [torch.float32, torch.bfloat16, torch.float16]
# Ragged tiles, one row, and a tile that is longer than a program holds at once.
TILES = [*((70, 40, bits) for bits in BITS), (1, 1, 5), (300, 280, 5), (300, 280, 2)]


@pytest.fixture
def kernels(interpreted):
    from razorctl.ops.triton import quantize

    return interpreted(quantize)


def activation(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of different columns differ in size; the rows lie apart."""
    x = torch.randn(rows, columns + 16) * torch.logspace(-3, 3, columns + 16) + 1
    return x.to(dtype)[:, :columns]


def alike(got, want, bits: int, rows: int, columns: int) -> None:
    """Codes, zero points and scales are equal, but for a few that sums round elsewhere."""
    codes = [unpack(packed, bits, rows, columns).int() for packed in (got[0], want[0])]
    apart = (codes[0] - codes[1]).abs()
    assert apart.max() <= 1
    assert (apart > 0).float().mean() < 2e-3
    torch.testing.assert_close(got[2], want[2], rtol=2**-7, atol=0)
    same = got[2] == want[2]
    assert same.float().mean() > 0.98
    assert (got[1] - want[1])[same].abs().max() <= 1
    assert (got[1] != want[1])[same].float().mean() < 0.05


@pytest.mark.parametrize(("rows", "tile_rows", "bits"), TILES)
def test_quantize(rows, tile_rows, bits, kernels):
    x = activation(rows, 192)
    want = references.quantize(x, bits, tile_rows)
    alike(kernels.quantize(x, bits, tile_rows), want, bits, rows, 192)


@pytest.mark.parametrize("dtype", TYPES[1:])
def test_quantize_half(dtype, kernels):
    x = activation(9, 64, dtype)
    x[0, :3] = torch.tensor([float("inf"), -float("inf"), 0])
    x[:, 3] = 0
    alike(kernels.quantize(x, 4, 9), references.quantize(x, 4, 9), 4, 9, 64)


@pytest.mark.parametrize("tile_rows", [8, 300])
def test_quantize_at_random(tile_rows, kernels):
    x, seed = activation(20, 64), torch.tensor(-5)
    want = references.quantize(x, 2, tile_rows, seed=seed)
    alike(kernels.quantize(x, 2, tile_rows, None, None, seed), want, 2, 20, 64)


@pytest.mark.parametrize("centers", [True, False])
def test_quantize_normalized(centers, kernels):
    x = activation(20, 64, torch.bfloat16)
    mean, rstd = torch.randn(20, 1) if centers else None, torch.rand(20, 1) + 0.5
    want = references.quantize(x, 5, 8, mean, rstd)
    alike(kernels.quantize(x, 5, 8, mean, rstd), want, 5, 20, 64)


@pytest.mark.parametrize("bits", BITS)
def test_dequantize(bits, kernels):
    x, bias = activation(70, 192), torch.randn(192)
    copied = references.quantize(x, bits, 40)
    for copy in (copied, copied._replace(scale=torch.randn(2, 192), bias=bias)):
        want = references.dequantize(copy, 70, torch.float32)
        got = kernels.dequantize(copy, 70, torch.float32)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


def test_dequantize_to_half(kernels):
    copy = references.quantize(activation(20, 64), 5, 20)
    want = references.dequantize(copy, 20, torch.float16)
    torch.testing.assert_close(kernels.dequantize(copy, 20, torch.float16), want)
