import pytest
import torch

from razorctl.ops.quantise import (
    BITS,
    codes,
    dequantise,
    pack,
    packed_bytes,
    quantise,
    unpack,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
every_width = pytest.mark.parametrize("bits", BITS)


def round_trip(x: torch.Tensor, bits: int, stochastic: bool = False) -> torch.Tensor:
    packed, offset, step = quantise(x, bits, stochastic)
    assert packed.dtype == torch.uint8
    assert packed.shape == (packed_bytes(x.numel(), bits),)
    assert offset.shape == step.shape == (x.shape[0], x.shape[2])
    return dequantise(packed, offset, step, x.shape, bits, x.dtype)


@every_width
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 1001])
def test_packing(n, bits, device):
    want = torch.randint(2**bits, (n,), dtype=torch.uint8, device=device)
    packed = pack(want, bits)
    assert packed.numel() == packed_bytes(n, bits) <= n * bits / 8 + 2
    assert torch.equal(unpack(packed, bits, n), want)


@every_width
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 40, 7), (3, 13, 5), (2, 1, 3)])
def test_nearest_is_within_half_a_step(shape, dtype, bits, device):
    x = torch.randn(shape, device=device).to(dtype)
    back = round_trip(x, bits)
    span = x.double().amax(1, keepdim=True) - x.double().amin(1, keepdim=True)
    rounding = 4 * torch.finfo(dtype).eps * x.double().abs().amax(1, keepdim=True)
    assert ((back.double() - x.double()).abs() <= span / (2**bits - 1) / 2 + rounding).all()


@every_width
def test_naive_twin(bits, device):
    x = torch.randn(2, 9, 4, device=device)
    packed, offset, step = quantise(x, bits)
    got = codes(packed, list(x.shape), bits)
    for block in range(2):
        for column in range(4):
            tile = x[block, :, column].tolist()
            low, width = min(tile), (max(tile) - min(tile)) / (2**bits - 1)
            want = [round((value - low) / width) for value in tile]
            assert got[block, :, column].tolist() == want
            assert offset[block, column].item() == pytest.approx(low)
            assert step[block, column].item() == pytest.approx(width)


@every_width
def test_stochastic_rounding_keeps_the_mean(bits, device):
    x = torch.linspace(-1, 2, 50, device=device).view(1, 50, 1)
    mean = torch.stack([round_trip(x, bits, stochastic=True) for _ in range(2000)]).mean(0)
    step = 3 / (2**bits - 1)
    assert (mean - x).abs().max() < 0.07 * step
    assert round_trip(x, bits, stochastic=True).sub(x).abs().max() <= 1.001 * step


@every_width
@pytest.mark.parametrize("dtype", DTYPES)
def test_degenerate_tiles(bits, dtype, device):
    huge = torch.finfo(dtype).max
    for value in (0.0, 1.0, -3.0, huge, 1e-30):
        x = torch.full((2, 6, 3), value, device=device, dtype=dtype)
        assert torch.equal(round_trip(x, bits), x)
    spread = torch.tensor([-huge / 4, 0, huge / 4], device=device, dtype=dtype).view(1, 3, 1)
    assert round_trip(spread, bits).isfinite().all()
    outlier = torch.zeros(1, 100, 1, device=device, dtype=dtype)
    outlier[0, 3] = 1000
    torch.testing.assert_close(round_trip(outlier, bits), outlier)
    assert round_trip(torch.full((1, 4, 1), torch.nan, device=device), bits).isfinite().all()
    assert round_trip(torch.empty(2, 0, 3, device=device), bits).shape == (2, 0, 3)


@every_width
def test_registration(bits):
    x = torch.randn(2, 9, 5)
    torch.library.opcheck(quantise, (x, bits))
    torch.library.opcheck(codes, (quantise(x, bits)[0], [2, 9, 5], bits))
