import pytest
import torch

from tests.cases import CASES, stock
from tests.layers.test_every_layer import assert_close, run


@pytest.mark.parametrize("rule", ["topk", "columns-norm", "topk, centered", "half"])
def test_gamma_learns_from_what_is_restored_and_the_input_gradient_is_exact(rule, device):
    layer = CASES["layer scale"].layer(rule, device=device)
    x = torch.randn(4, 5, 33, device=device)
    y, dx, dgamma = run(layer, x)
    rows = x.view(-1, 33)
    stand_in = layer.rules.wide.pack(rows).values().view(x.shape)
    cotangent = torch.linspace(-1, 1, y.numel(), device=device).view(y.shape).sin()
    assert_close([dgamma], [(cotangent * stand_in).sum((0, 1))], 1e-5)
    stock_y, stock_dx, _ = run(stock(layer), x)
    assert torch.equal(y, stock_y)
    assert torch.equal(dx, stock_dx)


def test_a_frozen_gamma_is_all_that_is_saved():
    layer = CASES["layer scale"].layer("topk")
    layer.gamma.requires_grad_(False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(4, 33, requires_grad=True))
    assert [t.data_ptr() for t in saved] == [layer.gamma.data_ptr()]
