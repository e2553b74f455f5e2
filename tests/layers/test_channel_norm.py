"""Norms with a weight for each channel: the oracle, running statistics, fixed statistics."""

import copy

import pytest
import torch
from torch import Tensor, nn

from razorctl.layers.by_type import swaps
from razorctl.layers.kinds.batch_norm import BatchNorm
from tests.cases import CASES, norm, razor, stock
from tests.layers.test_every_layer import TOLERANCE, assert_close, run

NORMS = [name for name in CASES if "batchnorm" in name or "groupnorm" in name]
PLAIN = [name for name in NORMS if "act" not in name and name != "timm batchnorm"]
BATCH = [name for name in NORMS if "batchnorm" in name]
RULES = ["topk", "columns-bandit", "topk, centered", "half", "3-bit"]


def oracle(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The gradients of input and parameters in double precision, at the restored x_hat.

    A channel of a batch, or some channels of an image, make the rows of a plain normalization.
    """
    groups = 1 if isinstance(layer, BatchNorm) else layer.num_groups
    batch, channels = x.shape[:2]

    def together(t: Tensor) -> Tensor:  # what is normalized together as [sets, values]
        t = t.double().reshape(batch, channels, -1)
        if isinstance(layer, BatchNorm):
            return t.movedim(1, 0).reshape(channels, -1)
        return t.reshape(batch * groups, -1)

    def apart(t: Tensor) -> Tensor:
        if isinstance(layer, BatchNorm):
            return t.view(channels, batch, -1).movedim(0, 1).reshape(x.shape)
        return t.view(x.shape)

    sets = together(x)
    rstd = (sets.var(1, correction=0, keepdim=True) + layer.eps).rsqrt()
    x_hat = apart((sets - sets.mean(1, keepdim=True)) * rstd).to(x.dtype)
    rows = x_hat.movedim(1, -1).reshape(-1, channels)
    rule = layer.rules.wide
    torch.manual_seed(7)
    restored = rule.pack(rows).values().view(batch, *x.shape[2:], channels).movedim(-1, 1)
    shape = 1, -1, *[1] * (x.dim() - 2)
    weight = x.new_ones(channels) if layer.weight is None else layer.weight.detach()
    g, at = together(dy * weight.view(shape)), together(restored)
    dx = rstd * (g - g.mean(1, keepdim=True) - at * (g * at).mean(1, keepdim=True))
    grads = [apart(dx)]
    if layer.weight is not None:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        grads += [(dy * restored).sum(axes), dy.sum(axes)]
    return [t.to(x.dtype) for t in grads]


@pytest.mark.parametrize("case", PLAIN)
@pytest.mark.parametrize("rule", RULES)
def test_gradients_equal_the_oracle(case, rule, device):
    for shape in CASES[case].shapes:
        layer = CASES[case].layer(rule, device=device)
        x = 2 * torch.randn(shape, device=device) + 1
        first = copy.deepcopy(layer)
        y, *got = run(layer, x)
        cotangent = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).sin()
        assert_close(got, oracle(first, x, cotangent), TOLERANCE[None])


@pytest.mark.parametrize("case", BATCH)
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
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
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        before(x.requires_grad_())
    assert max(t.numel() for t in saved) == x.shape[1]  # statistics and the weight


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


@pytest.mark.parametrize("case", ["timm image layernorm", "torchvision image layernorm"])
@pytest.mark.parametrize("rule", ["topk", "3-bit"])
def test_a_layernorm_of_images_is_one_of_pixels(case, rule):
    layer = CASES[case].layer(rule)
    pixels = norm(nn.LayerNorm(6, eps=layer.eps))
    pixels.load_state_dict(layer.state_dict())
    pixels = razor(pixels, layer.rules.wide)
    x = torch.randn(2, 6, 5, 7)
    _, dx, *got = run(layer, x)
    last = x.permute(0, 2, 3, 1).contiguous().requires_grad_()
    cotangent = torch.linspace(-1, 1, x.numel()).view(x.shape).sin()
    pixels(last).backward(cotangent.permute(0, 2, 3, 1))
    want = [last.grad.permute(0, 3, 1, 2), *(p.grad for p in pixels.parameters())]
    assert_close([dx, *got], want, 1e-6)


def test_synchronized_norms_stay_stock():
    assert nn.SyncBatchNorm not in swaps()
