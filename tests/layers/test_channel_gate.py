"""Factors of channels against the oracle: the stock gradient of the factor at the restored x."""

import pytest
import torch
from torch import Tensor, nn

from razorctl.layers.kinds.channel_gate import Gate
from razorctl.rules.dense import Dense
from razorctl.rules.prune import TopK
from razorctl.rules.quantized import Quantized
from tests.cases import both


class Product(Gate, nn.Module):
    """Nothing but the product."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return self.gated(x, gate)


@pytest.mark.parametrize("rule", [Dense(), TopK(0.3), Quantized(3)])
@pytest.mark.parametrize("batch", [1, 4])
def test_gradients_equal_the_oracle(rule, batch):
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


def test_a_fixed_factor_needs_no_x():
    layer, saved = Product(), []
    layer.rules = both(Dense())
    x, gate = torch.randn(4, 5, 3, 7, requires_grad=True), torch.randn(4, 5, 1, 1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x, gate)
    assert [t.shape for t in saved] == [gate.shape]
