"""Properties of one kind of layer: norms, activations, dropout, pooling, convolutions."""

import copy
import math
import random

import pytest
import torch
from torch import Tensor, nn

from razorctl import Recipe, sparsify
from razorctl.layers.base import LayerSettings
from razorctl.layers.by_type import swaps
from razorctl.layers.kinds.conv import Conv2d
from razorctl.rules.dense import Dense
from razorctl.rules.prune import Columns
from tests.cases import CASES, both, razor, stock
from tests.kept import saved
from tests.layers.test_every_layer import TOLERANCE, assert_close, run
from tests.layers.test_oracles import Product

BATCH = [name for name in CASES if "batchnorm" in name]
NORMS = [name for name in CASES if " norm" in f" {name}" and not CASES[name].attention]
FORMATS = (torch.contiguous_format, torch.channels_last)
every_format = pytest.mark.parametrize("memory_format", FORMATS)


@pytest.mark.parametrize("case", NORMS)
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_autocast_keeps_the_low_precision_input_of_a_norm(case, precision):
    for rule in ("dense", "topk"):
        x = torch.randn(CASES[case].shapes[0], requires_grad=True)
        with torch.autocast("cpu", precision):
            tensors = saved(CASES[case].layer(rule), x)
        # Stock keeps single precision, in which it runs.
        assert (precision in {t.dtype for t in tensors}) == (rule != "dense")
    assert all(t.numel() < 165 for t in tensors if t.dtype == torch.float32)


@pytest.mark.parametrize(
    ("row", "weight", "warned"), [(1e-5, 1.0, True), (1e-5, 1e-3, False), (0.1, 1.0, False)]
)
def test_rows_below_eps_that_have_most_of_the_gradient_are_named_once(row, weight, warned, caplog):
    norms = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.LayerNorm(64))
    sparsify(norms, Recipe("razor", 0.5))
    x = torch.randn(32, 64)
    x[0] *= row
    for _ in range(2):
        y = norms(x)
        (weight * y[0].sin().sum() + (1 - weight) * y[1:].sin().sum()).backward()
    assert [record.args[0] for record in caplog.records] == warned * ["0 (LayerNorm)"]


@pytest.mark.parametrize("case", BATCH)
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@every_format
def test_running_statistics_are_those_of_stock(case, precision, memory_format):
    layer = CASES[case].layer("topk")
    other = stock(copy.deepcopy(layer))
    for scale in (1.0, 3.0, 0.1):
        x = scale * torch.randn(CASES[case].shapes[0]) + scale
        if x.dim() == 4:
            x = x.contiguous(memory_format=memory_format)
        ys = [run(module, x.to(precision), precision)[0] for module in (layer, other)]
        assert torch.equal(*ys)
    assert list(layer.state_dict()) == list(other.state_dict())
    for a, b in zip(layer.buffers(), other.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("case", [case for case in BATCH if case != "bare batchnorm"])
@pytest.mark.parametrize("rule", ["topk", "dense"])
def test_fixed_statistics_take_x_for_the_weight_alone(case, rule):
    layer = CASES[case].layer(rule)
    torch.nn.init.normal_(layer.running_mean)
    torch.nn.init.uniform_(layer.running_var, 0.5, 2.0)
    x = torch.randn(CASES[case].shapes[0])
    if case == "timm batchnorm":
        layer.act = nn.Identity()
    got = run(layer.eval(), x)
    before = copy.deepcopy(layer)
    want = run(stock(layer), x)
    assert torch.equal(got[0], want[0])
    assert_close(got[1:2] + got[3:], want[1:2] + want[3:], TOLERANCE[None])
    if rule == "dense":
        assert_close(got[2:3], want[2:3], TOLERANCE[None])
    else:
        assert not torch.allclose(got[2], want[2])
    before.requires_grad_(False)
    kept = saved(before, x.requires_grad_())
    assert max(t.numel() for t in kept) == x.shape[1]  # statistics and the weight


@pytest.mark.parametrize("trained", [False, True])
def test_the_mode_of_the_forward_pass_counts(trained):
    """An evaluation may come between the passes, or a part of a model may change its mode."""
    layer, x = CASES["batchnorm"].layer("dense").train(trained), torch.randn(4, 6, 3, 3)
    got = []
    for switched in (False, True):
        leaf = x.clone().requires_grad_()
        loss = layer(leaf).pow(3).sum()
        layer.train(trained != switched)
        got.append(torch.autograd.grad(loss, (leaf, *layer.parameters())))
        layer.train(trained)
    torch.testing.assert_close(*got, rtol=0, atol=0)


def test_the_errors_of_stock():
    for build, shape in ((nn.BatchNorm2d, (1, 6, 1, 1)), (nn.BatchNorm1d, (2, 6, 3, 3))):
        layer = razor(build(6), CASES["batchnorm"].rule("topk"))
        with pytest.raises(ValueError, match=r"expected|Expected"):
            layer(torch.randn(shape, requires_grad=True))


def test_a_setting_that_needs_another_kernel_is_left_to_stock():
    layer = CASES["timm groupnorm"].layer("topk")
    assert layer.takes(torch.randn(2, 6, 3, 3))
    layer._fast_norm = True
    assert not layer.takes(torch.randn(2, 6, 3, 3))


def test_relu_saves_a_bit_an_element_and_is_exact(device):
    layer = razor(nn.ReLU().to(device), CASES["relu"].rule("half"))
    x = torch.randn(7, 33, device=device)
    x[0] = 0
    assert [t.nbytes for t in saved(layer, x.requires_grad_())] == [(7 * 33 + 7) // 8]
    got = run(layer, x)
    want = run(stock(layer), x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("second", [nn.SiLU, nn.ReLU])
def test_two_functions_in_a_row(second):
    """The second finds the copy that the first one offers of its output."""
    net = nn.Sequential(nn.Linear(33, 64), nn.GELU(), second(), nn.Linear(64, 3))
    x = torch.randn(9, 33)
    want = run(copy.deepcopy(net), x)
    sparsify(net.train(), Recipe("int8"))
    assert_close(run(net, x)[1:], want[1:], 0.05)


@pytest.mark.parametrize("build", [nn.ReLU, nn.SiLU])
@pytest.mark.parametrize("rule", ["dense", "half"])
def test_in_place_functions_stay_in_place(build, rule):
    grads = []
    for layer in (build(inplace=True), razor(build(inplace=True), CASES["gelu"].rule(rule))):
        torch.manual_seed(0)
        x = torch.randn(5, 33, requires_grad=True)
        hidden = x * 2
        y = layer(hidden)
        assert y.data_ptr() == hidden.data_ptr()
        y.square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=2e-3, atol=2e-3)


def test_a_fixed_factor_needs_no_x():
    layer, gate = Product(), torch.randn(4, 5, 1, 1)
    layer.rules = both(Dense())
    kept = saved(layer, torch.randn(4, 5, 3, 7, requires_grad=True), gate)
    assert [t.shape for t in kept] == [gate.shape]


def test_a_frozen_gamma_is_all_that_is_saved():
    layer = CASES["layer scale"].layer("topk")
    layer.gamma.requires_grad_(False)
    kept = saved(layer, torch.randn(4, 33, requires_grad=True))
    assert [t.data_ptr() for t in kept] == [layer.gamma.data_ptr()]


@pytest.mark.parametrize("p", [0.0, 0.1, 0.93, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dropout_draws_and_computes_what_stock_does(p, dtype, device):
    results = []
    for layer in (nn.Dropout(p), razor(nn.Dropout(p), Dense())):
        torch.manual_seed(3)
        x = torch.randn(7, 33, device=device).to(dtype)
        x.view(-1)[::3] = 0  # where the output does not tell what was dropped
        x.requires_grad_()
        y = layer(x)
        y.backward(torch.ones_like(y))
        results.append((y.detach(), x.grad))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
    if 0 < p < 1:  # a bit an element
        assert [t.nbytes for t in saved(layer, x)] == [(7 * 33 + 7) // 8]


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


@pytest.mark.parametrize("settings", MAXIMA, ids=str)
@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_maxima_are_exact(settings, memory_format, dtype):
    layer = razor(nn.MaxPool2d(**settings), Dense())
    x = torch.randn(2, 3, 19, 18).to(dtype).contiguous(memory_format=memory_format)
    x[0, 0, :6] = 1.0  # ties
    x[0, 1, 3, 3], x[0, 2] = math.nan, -math.inf
    got, want = run(layer, x), run(stock(copy.deepcopy(layer)), x)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert got[1].stride() == want[1].stride()
    (packed,) = saved(layer, x.clone().requires_grad_())
    places = math.prod(layer.geometry[0][:2])
    bits = {4: 2, 6: 3, 9: 4, 25: 5, 256: 8}[places]
    assert packed.numel() <= got[0].numel() * bits / 8 + 8 * bits


@pytest.mark.parametrize("layer", MEANS, ids=str)
@every_format
def test_means_save_nothing(layer, memory_format):
    layer = razor(copy.deepcopy(layer), Dense())
    x = torch.randn(2, 3, 9, 8).contiguous(memory_format=memory_format)
    assert not saved(layer, x.clone().requires_grad_())
    got, want = run(layer, x), run(stock(layer), x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_given_output_size_is_left_to_stock():
    layer = CASES["transposed conv"].layer("topk")
    layer.rules = None
    x = torch.randn(2, 6, 5, 4)
    y = layer(x, output_size=[9, 7])
    assert y.shape == (2, 8, 9, 7)
    assert torch.equal(y, stock(layer)(x, output_size=[9, 7]))


def draw(rng: random.Random) -> tuple[nn.Conv2d, Tensor]:
    """A stock layer and an image that is large enough for it."""
    while True:
        groups, stride = rng.choice((1, 1, 1, 2, 3)), rng.randint(1, 3)
        kernel = rng.choice((1, rng.randint(1, 7))), rng.choice((1, rng.randint(1, 7)))
        channels = groups * rng.randint(1, 5)
        layer = nn.Conv2d(
            channels,
            groups * rng.randint(1, 17),
            kernel,
            stride=rng.choice((stride, (stride, rng.randint(1, 3)))),
            padding=tuple(rng.randint(0, k // 2) for k in kernel),
            dilation=rng.randint(1, 2),
            groups=groups,
            bias=rng.random() < 0.5,
        )
        height = rng.choice((rng.randint(1, 15), 64, 65))
        image = torch.rand(rng.randint(1, 2), channels, height, height + rng.choice((0, 0, 1, 2)))
        sides = zip(image.shape[2:], layer.padding, layer.dilation, kernel, strict=True)
        if all(side + 2 * p > d * (k - 1) for side, p, d, k in sides):
            return layer, image


def gradients(layer: nn.Conv2d, image: Tensor) -> list[Tensor]:
    """Of the input and of every parameter."""
    layer.zero_grad()
    image = image.clone().requires_grad_()
    y = layer(image)
    torch.manual_seed(0)
    y.backward(torch.rand_like(y))  # positive, as the image is, so that no sum cancels
    return [t.grad for t in (image, *layer.parameters())]


def test_no_geometry_differs_from_stock():
    rng = random.Random(0)
    for number in range(150):
        layer, image = draw(rng)
        want = gradients(layer, image)
        rule = Columns(1.0) if layer.groups == 1 and number % 2 else Dense()
        Conv2d.attach(layer, both(rule), LayerSettings())
        for a, b in zip(gradients(layer, image), want, strict=True):
            assert (a - b).norm() <= 2e-5 * b.norm(), (layer, image.shape)


@every_format
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


NARROW = {"kernel_size": 3, "groups": 2}
# Layers that stay stock, and the rule that would be theirs.
UNFIT = [
    (nn.MaxPool2d(17), "dense"),
    (nn.MaxPool2d(2, return_indices=True), "dense"),
    (nn.AdaptiveAvgPool2d(1), "dense"),
    (nn.Dropout(0.5, inplace=True), "dense"),
    (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), "topk"),
    (nn.Conv2d(4, 4, 2, padding="same"), "topk"),
    (nn.Conv2d(4, 4, **NARROW), "columns-norm"),
    (nn.Conv2d(4, 4, **NARROW), "topk, centered"),
]


@pytest.mark.parametrize(("layer", "rule"), UNFIT, ids=str)
def test_what_stays_stock(layer, rule):
    kind = swaps()[type(layer)]
    assert not kind.fits(layer, CASES["conv"].rule(rule))
    assert type(layer) is not nn.Conv2d or kind.fits(nn.Conv2d(4, 4, 3), CASES["conv"].rule(rule))


@pytest.mark.parametrize("case", ["max pool", "conv"])
def test_an_image_without_batch_is_left_to_stock(case):
    layer = CASES[case].layer("dense")
    layer.rules = None  # whoever asks it fails
    x = torch.randn(6, 7, 5, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.any()


def test_what_cuts_an_image_has_a_rule_of_its_own():
    kinds = [swaps()[nn.Conv2d].rule_kind(CASES[case].build()) for case in ("patches", "conv")]
    assert kinds == ["patch", "conv"]


def test_a_patch_embedding_keeps_pixels_not_channels():
    kept = saved(CASES["patches"].layer("columns-norm"), torch.randn(2, 3, 8, 8))
    assert [t.shape for t in kept if t.is_floating_point()] == [(8, 14)]  # 30 % of 48 columns
