"""Razor convolutions against the oracle: the stock weight gradient of what the rule restores."""

import copy
from functools import partial
from pathlib import Path
from runpy import run_path

import pytest
import torch
import torch.nn.functional as F
from timm.layers.padding import pad_same
from torch import nn

from razorctl.layers.by_type import swaps
from razorctl.ops.images import pixels
from tests.cases import CASES, stock
from tests.forked import Forked
from tests.layers.test_every_layer import TOLERANCE, assert_close, run

CONVS = ("patches", "pointwise", "conv", "same conv", "grouped conv")
RULE_NAMES = ["topk", "half", "columns-norm", "columns-uniform", "topk, centered"]
PAIRS = [(case, rule) for case in CONVS for rule in RULE_NAMES if CASES[case].fits(rule)]


def cut(x, size):
    """Images as rows: their patches of a size, channels first, as `F.unfold` has them."""
    return F.unfold(x, size, stride=size).movedim(1, -1).flatten(0, 1)


def images(rows, shape, size):
    """The inverse of `cut`; pixels that no patch covers are zero."""
    patches = rows.view(shape[0], -1, rows.shape[1]).movedim(-1, 1)
    return F.fold(patches, shape[2:], size, stride=size)


@pytest.mark.parametrize(("case", "rule"), PAIRS)
def test_weight_gradients_equal_the_oracle(case, rule, device):
    for shape in CASES[case].shapes:
        layer = CASES[case].layer(rule, device=device)
        x = torch.randn(shape, device=device)
        size = layer.kernel_size if case == "patches" else (1, 1)
        rows = cut(x, size)
        assert torch.equal(pixels(x) if layer.patch is None else layer.patches(x), rows)
        assert rows.shape[1] == layer.columns(layer)
        rule = copy.deepcopy(layer.rules.wide)
        stand_in = images(rule.pack(rows).values(), shape, size)
        y, _, dw, *_ = run(layer, x)
        weight = layer.weight.detach().clone().requires_grad_()
        layer_output = layer._conv_forward(stand_in, weight, None)
        cotangent = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).sin()
        layer_output.backward(cotangent)
        assert_close([dw], [weight.grad], TOLERANCE[None])


OTHERS = ("conv1d", "transposed conv", "transposed conv1d", "timm same conv")


@pytest.mark.parametrize(
    ("case", "rule"),
    [(case, rule) for case in OTHERS for rule in RULE_NAMES if CASES[case].fits(rule)],
)
def test_other_convolutions_equal_the_oracle(case, rule, device):
    for shape in CASES[case].shapes:
        layer = CASES[case].layer(rule, device=device)
        x = torch.randn(shape, device=device)
        padded = x if "same" not in case else pad_same(x, (3, 3), (2, 2))
        rows = padded.movedim(1, -1).flatten(0, -2)
        rule = copy.deepcopy(layer.rules.wide)
        restored = rule.pack(rows).values()
        restored = restored.view(*padded.movedim(1, -1).shape).movedim(-1, 1)
        y, _, dw, *_ = run(layer, x)
        layer = stock(layer)
        cotangent = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).sin()
        layer.weight.grad = None
        again = layer if "same" not in case else partial(F.conv2d, weight=layer.weight, stride=2)
        again(restored).backward(cotangent)
        assert_close([dw], [layer.weight.grad], TOLERANCE[None])


def test_a_given_output_size_is_left_to_stock():
    layer = CASES["transposed conv"].layer("topk")
    layer.rules = None
    x = torch.randn(2, 6, 5, 4)
    y = layer(x, output_size=[9, 7])
    assert y.shape == (2, 8, 9, 7)
    assert torch.equal(y, stock(layer)(x, output_size=[9, 7]))


def test_no_geometry_crashes_or_differs_from_stock(tmp_path):
    script = str(Path(__file__).with_name("conv_geometries.py"))
    code, out, errors = Forked(run_path, script, None, "__main__", folder=tmp_path).ended()
    assert code == 0, [*out.splitlines()[-1:], errors]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("rule", ["dense", "topk", "columns-norm"])
def test_the_kernel_gets_the_layout_of_the_input(memory_format, rule, monkeypatch):
    images_of_backward = []

    def backward(dy, image, *rest):
        if rest[-1][1]:
            images_of_backward.append(image)
        return torch.ops.aten.convolution_backward(dy, image, *rest)

    monkeypatch.setattr("razorctl.layers.kinds.conv.convolution_backward", backward)
    layer = CASES["conv"].layer(rule)
    layer(torch.randn(2, 6, 7, 5).contiguous(memory_format=memory_format)).sum().backward()
    assert images_of_backward[0].is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"kernel_size": 3, "padding": 1, "padding_mode": "reflect"}, "topk"),
        ({"kernel_size": 2, "padding": "same"}, "topk"),
        ({"kernel_size": 3, "groups": 2}, "columns-norm"),
        ({"kernel_size": 3, "groups": 2}, "topk, centered"),
    ],
)
def test_what_it_cannot_stand_in_for_is_not_taken(settings, rule):
    razor = swaps()[nn.Conv2d]
    assert not razor.fits(nn.Conv2d(4, 4, **settings), CASES["conv"].rule(rule))
    assert razor.fits(nn.Conv2d(4, 4, 3), CASES["conv"].rule(rule))


def test_what_cuts_an_image_has_a_rule_of_its_own():
    kinds = [swaps()[nn.Conv2d].rule_kind(CASES[case].build()) for case in CONVS]
    assert kinds == ["patch", *["conv"] * 4]


def test_a_patch_embedding_keeps_pixels_not_channels():
    layer = CASES["patches"].layer("columns-norm")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(2, 3, 8, 8))
    assert [t.shape for t in saved if t.is_floating_point()] == [(8, 14)]  # 30 % of 48 columns
