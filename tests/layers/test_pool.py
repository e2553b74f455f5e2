"""Pooling: gradients are exact, and few bytes are saved for them."""

import copy
import math

import pytest
import torch
from torch import nn

from razorctl.layers.by_type import swaps
from tests.cases import CASES, razor, stock
from tests.layers.test_every_layer import run

MAXIMA = [
    {"kernel_size": 2},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": (3, 2), "stride": (1, 3), "padding": (1, 0), "dilation": (2, 1)},
    {"kernel_size": 5, "stride": 3, "padding": 2, "ceil_mode": True},
    {"kernel_size": 16, "stride": 4, "padding": 8},
]
MEANS = [
    nn.AvgPool2d(3, 2, 1),
    nn.AvgPool2d(2, divisor_override=3),
    nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False),
    nn.AdaptiveAvgPool2d((3, None)),
]


def saved(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    tensors = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: tensors.append(t) or t, lambda t: t):
        layer(x.clone().requires_grad_())
    return tensors


@pytest.mark.parametrize("settings", MAXIMA, ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_maxima(settings, memory_format, dtype):
    layer = razor(nn.MaxPool2d(**settings), CASES["max pool"].rule("dense"))
    x = torch.randn(2, 3, 19, 18).to(dtype).contiguous(memory_format=memory_format)
    x[0, 0, :6] = 1.0  # ties
    got, want = run(layer, x), run(stock(copy.deepcopy(layer)), x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert got[1].stride() == want[1].stride()
    (packed,) = saved(layer, x)
    places = math.prod(layer.geometry[0][:2])
    bits = {4: 2, 6: 3, 9: 4, 25: 5, 256: 8}[places]
    assert packed.numel() <= got[0].numel() * bits / 8 + 8 * bits


@pytest.mark.parametrize("layer", MEANS, ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_means_save_nothing(layer, memory_format):
    layer = razor(copy.deepcopy(layer), CASES["max pool"].rule("dense"))
    x = torch.randn(2, 3, 9, 8).contiguous(memory_format=memory_format)
    assert not saved(layer, x)
    got, want = run(layer, x), run(stock(layer), x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "layer", [nn.MaxPool2d(17), nn.MaxPool2d(2, return_indices=True), nn.AdaptiveAvgPool2d(1)]
)
def test_what_stays_stock(layer):
    assert not swaps()[type(layer)].fits(layer, CASES["max pool"].rule("dense"))


def test_an_image_without_batch_is_left_to_stock():
    layer = CASES["max pool"].layer("dense")
    x = torch.randn(3, 6, 6, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.sum() == 27
