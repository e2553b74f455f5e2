import pytest
import torch

from razorctl.ops.op import FewBitCopy
from razorctl.ops.packing import BITS, packed_bytes, unpack
from razorctl.ops.quantize import dequantize, quantize
from tests import references

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
every_width = pytest.mark.parametrize("bits", BITS)
# Widths differ in how they are packed, which test_packing.py has; and two bits clip.
some_widths = pytest.mark.parametrize("bits", [8, 5, 2])


def seed(number: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(number, device=device)


def round_trip(x: torch.Tensor, bits: int, seed: torch.Tensor | None = None) -> torch.Tensor:
    """A round trip of tiles [tiles, rows, columns] of equal length."""
    tiles, rows, columns = x.shape
    packed, zero_point, scale = quantize(x.flatten(0, 1), bits, max(1, rows), seed=seed)
    assert packed.dtype == torch.uint8
    assert packed.shape == (packed_bytes(tiles * rows, columns, bits),)
    assert zero_point.shape == scale.shape == (tiles if rows else 0, columns)
    copy = FewBitCopy(packed, zero_point, scale, bits, max(1, rows))
    return dequantize(copy, tiles * rows, x.dtype).view(x.shape)


def clipped(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x limited to the range of codes of some bits, in double precision."""
    x = x.double()
    if bits != 2:
        return x
    std, mean = torch.std_mean(x, 1, correction=0, keepdim=True)
    return x.clamp(mean - 2 * std, mean + 2 * std)


@some_widths
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 40, 7), (2, 1, 3)])
def test_nearest_is_within_half_a_step(shape, dtype, bits, device):
    x = torch.randn(shape, device=device).to(dtype)
    back, x = round_trip(x, bits), clipped(x, bits)
    span = x.amax(1, keepdim=True) - x.amin(1, keepdim=True)
    rounding = (2**-15 + 4 * torch.finfo(dtype).eps) * x.abs().amax(1, keepdim=True)
    half = span / (2**bits - 1) * (0.5 + 1 / 16 + 2**-6)  # zero is rounded, a step rounded up
    assert ((back.double() - x).abs() <= half + rounding).all()


@every_width
def test_naive_twin(bits, device):
    x = torch.randn(14, 4, device=device)
    packed, zero, step = quantize(x, bits, 9)
    got = unpack(packed, bits, *x.shape)
    for tile, rows in enumerate((slice(0, 9), slice(9, 14))):
        reached = clipped(x[None, rows], bits)[0]
        for column in range(4):
            values = reached[:, column].tolist()
            width = step[tile, column].item()
            assert width == pytest.approx((max(values) - min(values)) / (2**bits - 1), rel=2**-6)
            assert zero[tile, column] == -round(8 * min(values) / width)
            want = [round(value / width + zero[tile, column].item() / 8) for value in values]
            assert got[rows, column].tolist() == want


@some_widths
@pytest.mark.parametrize(
    ("rows", "columns", "tile_rows"), [(50, 7, 50), (44, 3, 5), (70, 64, 40), (5, 7, 9)]
)
@pytest.mark.parametrize("random", [False, True])
def test_parts_change_nothing(rows, columns, tile_rows, bits, random, device, monkeypatch):
    x = torch.randn(rows, columns, device=device)
    args = x, bits, tile_rows, *((None, None, seed(3, device)) if random else ())
    whole, reference = quantize(*args), references.quantize(*args)
    monkeypatch.setattr("razorctl.ops.chunks.CACHED", {"cpu": 130})
    for got, want, other in zip(quantize(*args), whole, reference[:3], strict=True):
        assert torch.equal(got, want)
        assert torch.equal(got, other)
    copy = FewBitCopy(*whole, bits, tile_rows, torch.randn(columns, device=device))
    for dtype in DTYPES:
        back = [f(copy, rows, dtype) for f in (dequantize, references.dequantize)]
        assert back[0].dtype == dtype
        torch.testing.assert_close(back[0].float(), back[1].float(), rtol=2**-7, atol=1e-5)


@some_widths
@pytest.mark.parametrize("centered", [False, True])
def test_normalized_rows(bits, centered, device):
    x, rstd = torch.randn(20, 6, device=device), torch.rand(20, 1, device=device) + 0.5
    mean = torch.randn(20, 1, device=device) if centered else None
    normalized = (x - mean if centered else x) * rstd
    for got, want in zip(
        quantize(x, bits, 8, mean, rstd), quantize(normalized, bits, 8), strict=True
    ):
        torch.testing.assert_close(got, want)


@every_width
def test_stochastic_rounding_keeps_the_mean(bits, device):
    x = torch.linspace(-1, 2, 50, device=device).view(1, 50, 1)
    back = round_trip(x.repeat(2000, 1, 1), bits, seed(5, device))
    step = 3 / (2**bits - 1)
    assert (back.mean(0) - x[0]).abs().max() < 0.1 * step
    assert (back - x).abs().max() <= 1.005 * step  # which is rounded up


@some_widths
@pytest.mark.parametrize("dtype", DTYPES)
def test_degenerate_tiles(bits, dtype, device):
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    huge = 0.8 * most
    for ends in ((-most, most), (0, most), (-most, 0)):  # rounding must not carry them beyond
        x = torch.tensor(ends, dtype=dtype, device=device).view(1, 2, 1)
        assert round_trip(x, bits).isfinite().all()
    for value in (0.0, 1.0, -3.0, huge, 1e-30):
        x = torch.full((2, 6, 3), value, device=device, dtype=dtype)
        torch.testing.assert_close(round_trip(x, bits).double(), x.double(), rtol=2**-14, atol=0)
    spread = torch.tensor([-huge / 4, 0, huge / 4], device=device, dtype=dtype).view(1, 3, 1)
    assert round_trip(spread, bits).isfinite().all()
    outlier = torch.zeros(1, 100, 1, device=device, dtype=dtype)
    outlier[0, 3] = 1000
    back = round_trip(outlier, bits)
    assert (back[outlier == 0] == 0).all()
    torch.testing.assert_close(back.double(), clipped(outlier, bits), rtol=2**-6, atol=0)
    assert round_trip(torch.full((1, 4, 1), torch.nan, device=device), bits).isfinite().all()
    assert round_trip(torch.empty(2, 0, 3, device=device), bits).shape == (2, 0, 3)


@some_widths
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("run", [quantize, quantize.body], ids=["kernel", "body"])
def test_what_is_beyond_the_limit_has_an_outmost_code(run, dtype, bits, device):
    most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    ends = [(0, most), (-most, 0), (-most, most), (-torch.inf, torch.inf)]
    x = torch.tensor(ends, device=device).to(dtype).t().repeat(1, 16)
    got, want = run(x, bits, 2), references.quantize(x, bits, 2)
    low, high = unpack(got[0], bits, *x.shape)
    assert low.max() == 0
    assert high.min() >= 2**bits - 2  # a scale is rounded up
    for ours, theirs in zip(got, want, strict=False):
        assert torch.equal(ours, theirs)
