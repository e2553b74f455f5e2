import pytest
import torch

from razorctl.ops.quantize import (
    BITS,
    codes,
    dequantize,
    dequantize_reference,
    pack,
    packed_bytes,
    quantize,
    quantize_reference,
    scales,
    unpack,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
every_width = pytest.mark.parametrize("bits", BITS)


def round_trip(x: torch.Tensor, bits: int, stochastic: bool = False) -> torch.Tensor:
    packed, zero, step = quantize(x, bits, stochastic)
    assert packed.dtype == torch.uint8
    assert packed.shape == (packed_bytes(x.numel(), bits),)
    assert zero.shape == step.shape == (x.shape[0], x.shape[2])
    return dequantize(codes(packed, list(x.shape), bits), *scales(zero, step), x.dtype)


def clipped(x: torch.Tensor, bits: int) -> torch.Tensor:
    """What codes of so many bits reach to, in double precision."""
    x = x.double()
    if bits != 2:
        return x
    std, mean = torch.std_mean(x, 1, correction=0, keepdim=True)
    return x.clamp(mean - 2 * std, mean + 2 * std)


@every_width
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 1001])
def test_packing(n, bits, device):
    want = torch.randint(2**bits, (n,), dtype=torch.uint8, device=device)
    packed = pack(want, bits)
    assert packed.numel() == packed_bytes(n, bits) <= n * bits / 8 + 8 * bits
    assert torch.equal(unpack(packed, bits, n), want)


@every_width
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 40, 7), (3, 13, 5), (2, 1, 3)])
def test_nearest_is_within_half_a_step(shape, dtype, bits, device):
    x = torch.randn(shape, device=device).to(dtype)
    back, x = round_trip(x, bits), clipped(x, bits)
    span = x.amax(1, keepdim=True) - x.amin(1, keepdim=True)
    rounding = (2**-15 + 4 * torch.finfo(dtype).eps) * x.abs().amax(1, keepdim=True)
    half = span / (2**bits - 1) * (0.5 + 1 / 16 + 2**-6)  # zero is rounded, a step rounded up
    assert ((back.double() - x).abs() <= half + rounding).all()


@every_width
def test_naive_twin(bits, device):
    x = torch.randn(2, 9, 4, device=device)
    packed, zero, step = quantize(x, bits)
    got, x = codes(packed, list(x.shape), bits), clipped(x, bits)
    for block in range(2):
        for column in range(4):
            tile = x[block, :, column].tolist()
            width = step[block, column].item()
            assert width == pytest.approx((max(tile) - min(tile)) / (2**bits - 1), rel=2**-6)
            assert zero[block, column] == -round(8 * min(tile) / width)
            want = [round(value / width + zero[block, column].item() / 8) for value in tile]
            assert got[block, :, column].tolist() == want


@every_width
@pytest.mark.parametrize("shape", [(1, 50, 7), (9, 5, 3), (2, 40, 11)])
def test_chunks_change_nothing(shape, bits, device, monkeypatch):
    x = torch.randn(shape, device=device)
    whole = quantize(x, bits)
    for name in ("ELEMENTS", "CACHED"):
        monkeypatch.setattr(f"razorctl.ops.chunks.{name}", 30)
    for got, want, reference in zip(
        quantize(x, bits), whole, quantize_reference(x, bits), strict=True
    ):
        assert torch.equal(got, want)
        assert torch.equal(got, reference)


@pytest.mark.parametrize("shape", [(1, 50, 7), (9, 5, 3), (2, 40, 11), (50, 7)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_restoring_in_parts(shape, dtype, device, monkeypatch):
    numbers = torch.randint(256, shape, dtype=torch.uint8, device=device)
    tile = (*shape[:-2], shape[-1])
    offset, step = torch.randn(tile, device=device), torch.rand(tile, device=device)
    for name in ("ELEMENTS", "CACHED"):
        monkeypatch.setattr(f"razorctl.ops.chunks.{name}", 30)
    got = dequantize(numbers, offset, step, dtype)
    want = dequantize_reference(numbers, offset, step, dtype)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-5)


@every_width
def test_stochastic_rounding_keeps_the_mean(bits, device):
    x = torch.linspace(-1, 2, 50, device=device).view(1, 50, 1)
    mean = torch.stack([round_trip(x, bits, stochastic=True) for _ in range(2000)]).mean(0)
    step = 3 / (2**bits - 1)
    assert (mean - x).abs().max() < 0.1 * step
    assert round_trip(x, bits, stochastic=True).sub(x).abs().max() <= 1.001 * step


@every_width
@pytest.mark.parametrize("dtype", DTYPES)
def test_degenerate_tiles(bits, dtype, device):
    huge = 0.8 * min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
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


@every_width
def test_registration(bits):
    x = torch.randn(2, 9, 5)
    torch.library.opcheck(quantize, (x, bits))
    packed, zero, step = quantize(x, bits)
    torch.library.opcheck(codes, (packed, [2, 9, 5], bits))
    numbers = codes(packed, [2, 9, 5], bits)
    torch.library.opcheck(dequantize, (numbers, *scales(zero, step), torch.bfloat16))
