import pytest
import torch

from razorctl.ops import pixel_cross_entropy as file
from razorctl.ops.pixel_cross_entropy import (
    part_images,
    pixel_cross_entropy,
)
from tests import references

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# align_corners and the scales of each side
WAYS = [(False, None, None), (True, None, None), (False, 2.3, 1.7)]


def arguments(device="cpu", dtype=torch.float32, batch=3):
    x = torch.randn(batch, 5, 4, 3, device=device).to(dtype)
    target = torch.randint(5, (batch, 9, 5), device=device)
    target[:, ::3] = 255
    return x, target


@pytest.fixture(autouse=True)
def two_images(monkeypatch):
    monkeypatch.setattr(file, "BYTES", 2 * 4 * 5 * 9 * 5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_and_gradient_equal_the_reference(way, smoothing, weighted, device):
    x, target = arguments(device)
    factor = torch.randn(target.shape, device=device) if weighted else None
    want = references.pixel_cross_entropy(x, target, *way, 255, smoothing, factor)
    got = pixel_cross_entropy(x, target, *way, 255, smoothing, factor, True)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b.float(), rtol=1e-5, atol=1e-5)
    assert got[0][:, ::3].eq(0).all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_every_dtype_and_memory_format(dtype, memory, device):
    x, target = arguments(device, dtype)
    x = x.contiguous(memory_format=memory)
    want = references.pixel_cross_entropy(x, target, *WAYS[0], 255, 0.0, None)
    losses, dx = pixel_cross_entropy(x, target, *WAYS[0], 255, 0.0, None, True)
    assert (losses.dtype, dx.dtype) == (torch.promote_types(dtype, torch.float32), dtype)
    for a, b in zip((losses, dx), want, strict=True):
        assert (a.double() - b).norm() <= TOLERANCE[dtype] * b.norm()


def test_large_logits_stay_finite(device):
    x, target = arguments(device)
    want = references.pixel_cross_entropy(1e4 * x, target, *WAYS[0], 255, 0.0, None)
    got = pixel_cross_entropy(1e4 * x, target, *WAYS[0], 255, 0.0, None, True)
    torch.testing.assert_close(got[0], want[0].float(), rtol=1e-5, atol=1e-2)


def test_no_images_and_no_gradient(device):
    losses, dx = pixel_cross_entropy(*arguments(device, batch=0), *WAYS[0], 255, 0.0, None, True)
    assert (losses.shape, dx.shape) == ((0, 9, 5), (0, 5, 4, 3))
    assert pixel_cross_entropy(*arguments(device), *WAYS[0], 255, 0, None, False)[1].shape == (0,)


def test_a_part_is_at_most_a_quarter_gibibyte_or_an_image(monkeypatch):
    monkeypatch.setattr(file, "BYTES", 2**28)
    images = part_images(21, (520, 520))
    assert images * 21 * 520**2 * 4 <= 2**28 < (images + 1) * 21 * 520**2 * 4
    assert part_images(150, (1024, 1024)) == 1
