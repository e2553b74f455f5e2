import pytest
import torch
from torch import Tensor

from razorctl.ops.images import (
    dequantize_images,
    normalized_images,
    pixels,
    quantize_images,
    unrolled,
)
from razorctl.ops.op import FewBitCopy
from razorctl.ops.quantize import dequantize
from tests import references

# Rows packed by themselves and as one line; tiles across images, and a short last one.
shapes = pytest.mark.parametrize("shape", [(2, 7, 5, 3), (5, 64, 3, 4), (3, 6, 29)], ids=str)


def statistics(x: Tensor, each: bool) -> tuple[Tensor, Tensor]:
    """The mean and 1 / std of each channel, of all images or of each."""
    images = x.flatten(2)
    axes = (2,) if each else (0, 2)
    std, mean = torch.std_mean(images, axes, correction=0, keepdim=True)
    return mean.flatten(1), 1 / std.flatten(1)


@shapes
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_copy_is_that_of_rows(bits, shape, device):
    x = torch.randn(shape, device=device)
    got = FewBitCopy(*quantize_images(x, bits, 16), bits, 16)
    want = references.quantize(x.movedim(1, -1).reshape(-1, shape[1]).contiguous(), bits, 16)
    rows = x.numel() // shape[1]
    back = [references.dequantize(t, rows, x.dtype) for t in (got, want)]
    torch.testing.assert_close(*back)
    got = got._replace(bias=torch.randn(shape[1], device=device))
    for function, f in ((None, lambda t: t), ("relu6", torch.nn.functional.relu6)):
        images = dequantize_images(got, x.dtype, function, list(shape))
        values = dequantize(got, rows, x.dtype)
        assert images.is_contiguous()
        torch.testing.assert_close(pixels(images), f(values))


@pytest.mark.parametrize("each", [False, True])
def test_normalized_images(each, device):
    x = 3 * torch.randn(3, 5, 4, 6, device=device) + 2
    mean, rstd = statistics(x, each)
    got, want = quantize_images(x, 4, 16, mean, rstd), (x - mean[..., None, None])
    want = quantize_images(want * rstd[..., None, None], 4, 16)
    back = [dequantize(FewBitCopy(*t, 4, 16), 72, x.dtype) for t in (got, want)]
    assert (back[0] != back[1]).float().mean() < 0.01  # on a boundary of codes
    torch.testing.assert_close(
        normalized_images(x, mean, rstd), (x - mean[..., None, None]) * rstd[..., None, None]
    )


def test_empty_images():
    x = torch.empty(0, 3, 4, 4)
    copy = FewBitCopy(*quantize_images(x, 4, 16), 4, 16)
    assert dequantize_images(copy, x.dtype, None, [0, 3, 4, 4]).shape == x.shape


def test_rows_of_images_and_back():
    x = torch.randn(2, 3, 5, 4)
    assert torch.equal(unrolled(pixels(x), x.shape), x)
