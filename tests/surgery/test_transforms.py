"""Second derivatives, forward mode, torch.func and torch.fx of sparsified models in training."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, vmap
from torch.fx import symbolic_trace

from razorctl import Recipe, sparsify
from razorctl.layers.base import RazorLayer
from tests.models import vit


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Tanh(), nn.Linear(16, 4))


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))


@pytest.mark.parametrize("name", ["mlp", "vit"])
def test_functions_of_torch_func_transform_stock_layers(name):
    net = (mlp() if name == "mlp" else vit()).train()
    x = torch.randn(3, 8) if name == "mlp" else torch.randn(3, 3, 16, 16)
    parameters = dict(net.named_parameters())

    def loss(parameters, x):
        return functional_call(net, parameters, (x[None],)).square().sum()

    want = vmap(grad(loss), (None, 0), randomness="different")(parameters, x)
    sparsify(net, Recipe("int8"))
    got = vmap(grad(loss), (None, 0), randomness="different")(parameters, x)
    assert all(torch.equal(got[key], want[key]) for key in want)


def test_forward_mode_differentiates_stock_layers():
    net, x = mlp().train(), torch.randn(5, 8)

    def tangent():
        with forward_ad.dual_level():
            y = net(forward_ad.make_dual(x, torch.ones_like(x)))
            return forward_ad.unpack_dual(y).tangent

    want = tangent()
    sparsify(net, Recipe("int8"))
    assert torch.equal(tangent(), want)


def test_a_trace_of_jit_takes_stock_layers():
    net, x = mlp().train(), torch.randn(5, 8)
    want = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    sparsify(net, Recipe("int8"))
    traced = torch.jit.trace(net, (x,))
    got = torch.autograd.grad(traced(x).sum(), list(net.parameters()))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("training", [True, False])
def test_a_trace_of_fx_calls_the_layers(training):
    net = convolutions().train(training)
    twin, x = copy.deepcopy(net), torch.randn(2, 3, 8, 8)
    sparsify(net, Recipe("int8"))
    traced = symbolic_trace(net)
    assert {node.op for node in traced.graph.nodes} == {"placeholder", "call_module", "output"}
    assert all(isinstance(module, RazorLayer) for module in traced.children())
    assert torch.equal(traced(x), twin(x))


def test_a_trace_of_fx_looks_into_other_libraries():
    net, x = vit().train(), torch.randn(2, 3, 16, 16)
    want = net(x)
    sparsify(net, Recipe("int8"))
    assert torch.equal(symbolic_trace(net)(x), want)
