import pytest
import torch
from torch import nn

from tests.cases import CASES, razor


def layers(device, **settings) -> tuple[nn.Module, nn.Module]:
    rule = CASES["dropout"].rule("dense")
    return nn.Dropout(**settings).to(device), razor(nn.Dropout(**settings).to(device), rule)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 33), (1,), (3, 7, 2)])
def test_draws_and_computes_what_stock_does(p, dtype, shape, device):
    results = []
    for layer in layers(device, p=p):
        torch.manual_seed(3)
        x = torch.randn(shape, device=device).to(dtype)
        x.view(-1)[::3] = 0  # where the output does not tell what was dropped
        x.requires_grad_()
        y = layer(x)
        y.backward(torch.ones_like(y))
        results.append((y.detach(), x.grad))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


def test_saves_a_bit_an_element(device):
    _, layer = layers(device, p=0.5)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(7, 33, device=device, requires_grad=True))
    assert [t.numel() * t.element_size() for t in saved] == [(7 * 33 + 7) // 8]


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_certain_dropout_is_left_to_stock(p, device):
    stock, layer = layers(device, p=p)
    x = torch.randn(5, 33, device=device, requires_grad=True)
    assert torch.equal(layer(x), stock(x))


def test_in_place_dropout_is_not_taken():
    from razorctl.layers.kinds.dropout import Dropout

    assert not Dropout.fits(nn.Dropout(0.5, inplace=True), CASES["dropout"].rule("dense"))
