"""Razor activations: the exact derivative at what the rule restores."""

import copy

import pytest
import torch
from torch import nn

from razorctl import Recipe, sparsify
from tests.cases import CASES, razor, stock
from tests.layers.test_every_layer import assert_close, run

ACTIVATIONS = [
    name for name in CASES if any(word in name for word in ("elu", "silu", "swish", "relu"))
]


@pytest.mark.parametrize("case", ACTIVATIONS)
@pytest.mark.parametrize("rule", ["dense", "half", "topk"])
def test_gradients_equal_the_oracle(case, rule, device):
    layer = CASES[case].layer(rule, device=device)
    x = 2 * torch.randn(4, 5, 33, device=device)
    got = run(layer, x)
    rows = x.view(-1, 33)
    exact = "relu" in case and "squared" not in case
    stand_in = x if exact else layer.rules.wide.pack(rows).values()
    want = run(stock(layer), stand_in.view(x.shape))
    assert_close(got[1:], want[1:], 1e-6)


def test_relu_saves_a_bit_an_element_and_is_exact(device):
    layer = razor(nn.ReLU().to(device), CASES["relu"].rule("half"))
    x = torch.randn(7, 33, device=device)
    x[0] = 0
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x.requires_grad_())
    assert [t.numel() * t.element_size() for t in saved] == [(7 * 33 + 7) // 8]
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
