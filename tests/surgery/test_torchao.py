"""torchao's linear layers: int8 in all three GEMMs, the stock class and weights afterwards."""

import copy

import pytest
import torch
from torch import Tensor, nn

from razorctl import Recipe, restore, saved_bytes, sparsify
from razorctl.errors import UsageError
from razorctl.surgery import torchao
from tests.models import SMALL
from tests.surgery.test_adapters import build
from tests.surgery.test_methods import cosine, step

every_model = pytest.mark.parametrize("kind", SMALL)
METHOD = Recipe("torchao-int8")


@pytest.fixture(autouse=True)
def installed():
    pytest.importorskip("torchao")


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b from 8 bits of each row of a and each column of b, in floating point."""
    rows, columns = a.abs().amax(1, keepdim=True) / 127, b.abs().amax(0, keepdim=True) / 127
    return (a / rows).round() @ (b / columns).round() * rows * columns


@pytest.mark.parametrize("strided", [False, True])
def test_every_gemm_is_of_8_bits(strided):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(37, 19), nn.Linear(19, 3)).train()
    layer = net[0]
    sparsify(net, METHOD)
    x, dy = torch.randn(4, 11, 37), torch.randn(4, 11, 19)
    if strided:
        x, dy = torch.randn(4, 37, 11).mT, torch.randn(4, 1, 19).expand(4, 11, 19)
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    rows, dys, w = x.detach().reshape(-1, 37), dy.reshape(-1, 19), layer.weight.detach()
    want = (product(rows, w.T) + layer.bias, product(dys, w), product(rows.T, dys).T)
    for ours, theirs in zip((y, x.grad, layer.weight.grad), want, strict=True):
        torch.testing.assert_close(ours.reshape(theirs.shape), theirs)
    torch.testing.assert_close(layer.bias.grad, dys.sum(0))


@every_model
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=str)
def test_a_model_is_close_to_full_and_is_stock_again(kind, lora, precision):
    net, x = build(kind)
    stock = copy.deepcopy(net)
    torch.manual_seed(0)  # of the adapters
    sparsify(stock, Recipe("full", lora=lora))
    want = step(stock, x, precision)
    keys, types = list(net.state_dict()), [type(module) for module in net.modules()]
    torch.manual_seed(0)
    names = sparsify(net, Recipe("torchao-int8", lora=lora))
    assert names
    got = step(net, x, precision)
    assert not torch.equal(got[0], want[0])
    assert cosine(got[:1], want[:1]) > 0.99
    assert cosine(got[1:], want[1:]) > 0.95
    if not lora:
        assert list(net.state_dict()) == keys
        with torch.no_grad():  # what is evaluated is what the weights are elsewhere
            assert torch.equal(net(x), stock(x))
    restore(net)
    assert [type(module) for module in net.modules()] == types
    assert list(net.state_dict()) == keys


def test_it_saves_what_full_does():
    net, x = build("vit")
    full = saved_bytes(net, x)
    sparsify(net, METHOD)
    assert saved_bytes(net, x) == full


def test_what_it_cannot_take_is_refused_and_left_alone(monkeypatch):
    net, _ = build("vit")
    with pytest.raises(UsageError, match="no linear layer before its classifier for torchao"):
        sparsify(nn.Linear(3, 4), METHOD)
    with pytest.raises(UsageError, match="set joint to 'branches', or joint_budget to 1"):
        Recipe("torchao-int8", joint_budget=0.5)
    monkeypatch.setattr(torchao, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="torchao-int8 needs torchao, which is not installed"):
        sparsify(net, METHOD)
    assert not hasattr(net, "razor_recipe")
