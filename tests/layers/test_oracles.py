"""Gradients of each kind of layer against its oracle: what stock computes from the restored copy.

Each oracle returns the gradients of the input and of the parameters, None where it says nothing.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from timm.layers.padding import pad_same
from torch import Tensor, nn

from razorctl.layers.kinds.batch_norm import BatchNorm
from razorctl.layers.kinds.channel_gate import Gate
from razorctl.ops.images import pixels
from razorctl.rules.dense import Dense
from razorctl.rules.prune import TopK
from razorctl.rules.quantized import Quantized
from tests.cases import CASES, both, stock
from tests.layers.test_every_layer import TOLERANCE, assert_close, run

NORMS = [name for name in CASES if "norm" in name and not CASES[name].attention]
NORMS = [name for name in NORMS if not ("act" in name or name == "timm batchnorm")]
ACTIVATIONS = [n for n in CASES if any(word in n for word in ("elu", "silu", "swish", "relu"))]
CONVS = ("patches", "pointwise", "conv", "same conv", "grouped conv")
CONVS += ("conv1d", "transposed conv", "transposed conv1d", "timm same conv")
RULES = ["topk", "columns-norm", "columns-bandit", "topk, centered", "half", "3-bit"]
LINEAR = (*RULES, "dense", "4-bit-stochastic")
Grads = list[Tensor | None]


def restored(layer: nn.Module, rows: Tensor) -> Tensor:
    torch.manual_seed(7)
    rule = copy.deepcopy(layer.rules.wide)
    values: Tensor = rule.pack(rows).values()
    return values


def of_linear(layer: nn.Module, x: Tensor, dy: Tensor) -> Grads:
    rows, dy = (t.reshape(-1, t.shape[-1]) for t in (x, dy))
    return [(dy @ layer.weight).view(x.shape), dy.T @ restored(layer, rows), dy.sum(0)]


def of_norm(layer: nn.Module, x: Tensor, dy: Tensor) -> Grads:
    """In double precision. Values that are normalized together are a set [sets, values].

    y = x_hat w + b is linear in x_hat, and x_hat's own gradient (I - 1 1^T / D - x_hat x_hat^T / D)
    / std is that of a norm at the point x_hat / std; so both are taken at the restored x_hat.
    """
    channels, over_batch = hasattr(layer, "num_groups"), isinstance(layer, BatchNorm)
    columns = layer.columns(layer)
    first = channels or over_batch or (x.dim() == 4 and columns == x.shape[1])
    columns = x.shape[1] if first else columns

    def rows(t: Tensor) -> Tensor:
        return (t.movedim(1, -1) if first else t).reshape(-1, columns)

    def unrolled(t: Tensor) -> Tensor:
        last = t.view(x.shape[0], *x.shape[2:], columns).movedim(-1, 1) if first else t
        return last.reshape(x.shape)

    def sets(t: Tensor) -> Tensor:
        if over_batch:
            return t.double().movedim(1, 0).reshape(columns, -1)
        if channels:
            return t.double().reshape(len(x) * layer.num_groups, -1)
        return rows(t).double()

    def apart(t: Tensor) -> Tensor:
        if over_batch:
            return t.view(columns, len(x), *x.shape[2:]).movedim(0, 1)
        return t.reshape(x.shape) if channels else unrolled(t)

    centers = channels or over_batch or layer.centers
    values = sets(x)
    values = values - values.mean(1, keepdim=True) if centers else values
    eps = layer.epsilon(x) if hasattr(layer, "epsilon") else layer.eps
    std = (values.square().mean(1, keepdim=True) + eps).sqrt()
    at = restored(layer, rows(apart(values / std)).to(x.dtype))
    weight = None if layer.weight is None else layer.weight.detach().reshape(-1)
    if "Gemma" in type(layer).__name__:
        weight = 1 + weight
    g = rows(dy)
    gw, stand_in = sets(unrolled(g if weight is None else g * weight)), sets(unrolled(at))
    centered = gw - gw.mean(1, keepdim=True) if centers else gw
    dx = (centered - stand_in * (gw * stand_in).mean(1, keepdim=True)) / std
    grads = [apart(dx)]
    if weight is not None:
        grads.append((g * at).sum(0).view(layer.weight.shape))
    if getattr(layer, "bias", None) is not None:
        grads.append(g.sum(0).view(layer.bias.shape))
    return [t.to(x.dtype) for t in grads]


def of_activation(layer: nn.Module, x: Tensor, dy: Tensor) -> Grads:
    exact = type(stock(copy.deepcopy(layer))).__name__ in EXACT
    leaf = x if exact else restored(layer, x.reshape(-1, x.shape[-1])).view(x.shape)
    leaf = leaf.detach().requires_grad_()
    return [*torch.autograd.grad(stock(layer)(leaf), leaf, dy)]


EXACT = ("ReLU", "ReLU6", "LeakyReLU")


def of_scale(layer: nn.Module, x: Tensor, dy: Tensor) -> Grads:
    rows = x.reshape(-1, x.shape[-1])
    gamma = (dy.reshape(rows.shape) * restored(layer, rows)).sum(0)
    return [dy * layer.gamma.detach(), gamma]


def of_conv(layer: nn.Module, x: Tensor, dy: Tensor) -> Grads:
    """Of the weight, at patches or pixels that are restored, of the padded image."""
    same = type(layer).__name__ == "RazorConv2dSame"
    padded = pad_same(x, (3, 3), (2, 2)) if same else x
    if layer.patch is not None:
        size = layer.kernel_size
        rows = F.unfold(x, size, stride=size).movedim(1, -1).flatten(0, 1)
        assert torch.equal(layer.patches(x), rows)
        patches = restored(layer, rows).view(len(x), -1, rows.shape[1]).movedim(-1, 1)
        image = F.fold(patches, x.shape[2:], size, stride=size)
    else:
        rows = pixels(padded)
        last = padded.movedim(1, -1).shape
        image = restored(layer, rows).view(last).movedim(-1, 1)
    assert rows.shape[1] == layer.columns(layer)
    layer = stock(layer)
    forward = partial(F.conv2d, weight=layer.weight, stride=2) if same else layer
    (dw,) = torch.autograd.grad(forward(image), layer.weight, dy)
    return [None, dw, *[None] * (layer.bias is not None)]


ORACLES = [
    (of_linear, ("linear",), LINEAR),
    (of_norm, NORMS, RULES),
    (of_activation, ACTIVATIONS, ("dense", "half", "topk")),
    (of_scale, ("layer scale",), RULES),
    (of_conv, CONVS, RULES),
]
TRIPLES = [
    (oracle, case, rule)
    for oracle, cases, rules in ORACLES
    for case in cases
    for rule in rules
    if CASES[case].fits(rule)
    # Columns of a batch norm have the same norm, and a last bit may round its half the other way.
    and not ("batchnorm" in case and rule == "columns-norm")
    and not ("image" in case and rule == "half")
]


@pytest.mark.parametrize(
    ("oracle", "case", "rule"), TRIPLES, ids=lambda part: getattr(part, "__name__", part)
)
def test_gradients_equal_the_oracle(oracle, case, rule, device):
    for shape in CASES[case].shapes:
        layer = CASES[case].layer(rule, device=device)
        x = 2 * torch.randn(shape, device=device) + 1
        first = copy.deepcopy(layer)
        y, *got = run(layer, x)
        cotangent = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).sin()
        want = oracle(first, x, cotangent)
        pairs = [(a, b) for a, b in zip(got, want, strict=True) if b is not None]
        assert_close(*map(list, zip(*pairs, strict=True)), TOLERANCE[None])


class Product(Gate, nn.Module):
    """Nothing but the product."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.gated(x, gate)


@pytest.mark.parametrize("rule", [Dense(), TopK(0.3), Quantized(3)])
@pytest.mark.parametrize("batch", [1, 4])
def test_factors_of_channels_equal_the_oracle(rule, batch):
    layer = Product()
    layer.rules = both(rule)
    x = torch.randn(4, 5, 3, 7, requires_grad=True)
    gate = torch.randn(batch, 5, 1, 1, requires_grad=True)
    dy = torch.randn(4, 5, 3, 7)
    y = layer(x, gate)
    y.backward(dy)
    assert torch.equal(y, x * gate)
    assert torch.equal(x.grad, dy * gate)
    rows = x.detach().movedim(1, -1).reshape(-1, 5)
    restored = rule.pack(rows).values().view(4, 3, 7, 5).movedim(-1, 1)
    want = (dy * restored).sum((2, 3), keepdim=True)
    torch.testing.assert_close(gate.grad, want.sum(0, keepdim=True) if batch == 1 else want)
