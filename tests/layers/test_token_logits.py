"""Logits that are computed where something needs them, against the stock logits."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils.operations import convert_outputs_to_fp32
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from razorctl.errors import UsageError
from razorctl.layers.base import LayerSettings
from razorctl.layers.heads.token_logits import Head, Logits
from razorctl.memory.saved import traced_bytes
from razorctl.rules.dense import Dense
from tests.cases import both
from tests.layers.functions import Cubed, Doubled

CLASSES, WIDTH = 11, 7
TARGET = torch.tensor([[1, 5, -100, 3, 10], [0, -100, 2, 2, 7]])


def head(bias: bool = True, dtype: torch.dtype = torch.float32) -> Head:
    module = nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype).train()
    Head.attach(module, both(Dense()), LayerSettings())
    assert isinstance(module, Head)
    return module


def shifted(logits: Tensor, **options) -> Tensor:
    """The loss of transformers' ForCausalLMLoss."""
    target = F.pad(TARGET, (0, 1), value=-100)[..., 1:].contiguous().to(logits.device)
    return F.cross_entropy(logits.float().view(-1, CLASSES), target.view(-1), **options)


LOSSES = {
    "mean": shifted,
    "sum": lambda logits: shifted(logits, reduction="sum") / 7,
    "none": lambda logits: (shifted(logits, reduction="none") ** 2).sum(),
    "smoothing": lambda logits: shifted(logits, label_smoothing=0.1),
    "another ignored": lambda logits: F.cross_entropy(
        logits[:, 1:].reshape(-1, CLASSES), TARGET[:, 1:].flatten().clamp(min=0), ignore_index=2
    ),
    "module": lambda logits: nn.CrossEntropyLoss()(logits.flatten(0, 1), TARGET.flatten()),
    "slice": lambda logits: F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, CLASSES), TARGET[:, 1:].reshape(-1)
    ),
    "shifted": lambda logits: shifted(logits + torch.linspace(-1, 1, CLASSES)[None]),
    "one": lambda logits: F.cross_entropy(logits[0], TARGET[0]) + shifted(logits.to(logits.device)),
}
OTHER = {
    "classes first": lambda logits: F.cross_entropy(logits.transpose(1, 2), TARGET),
    "weighted": lambda logits: shifted(logits, weight=torch.linspace(1, 2, CLASSES)),
    "soft targets": lambda logits: F.cross_entropy(
        logits.flatten(0, 1), torch.linspace(0, 1, CLASSES).expand(10, -1)
    ),
    "softcap": lambda logits: shifted(3 * (logits / 3).tanh()),
    "in place": lambda logits: shifted(logits.div_(2)),
    "in place, after": lambda logits: (logits.mul_(2), shifted(logits))[1],
    "assigned": lambda logits: (logits.__setitem__((..., 0), -5.0), shifted(logits))[1],
    "log softmax": lambda logits: -F.log_softmax(logits[..., :-1, :], -1).mean(),
    "a column": lambda logits: logits[..., 3].sum() + logits[:, :, 1:4].square().sum(),
    "mneeds": lambda logits: F.cross_entropy(logits[TARGET >= 0], TARGET[TARGET >= 0]),
    "own function": lambda logits: Doubled.apply(logits).square().sum(),
    "own function of a copy": lambda logits: shifted(Copied.apply(logits)),
    "own function in place": lambda logits: shifted(Cubed.apply(logits)),
    "read before": lambda logits: logits.sum().detach() + shifted(Cubed.apply(logits)),
    "narrow": lambda logits: shifted(logits.bfloat16()),
    "positions added": lambda logits: shifted(logits + torch.linspace(-1, 1, 5)[:, None]),
    "a temperature added": lambda logits: shifted(torch.add(logits, torch.ones(1), alpha=2)),
}


class Copied(torch.autograd.Function):
    """A function whose result may be computed late, but not without its backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.contiguous()

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


def run(layer: nn.Module, loss, x: Tensor, autocast: bool = False) -> list[Tensor]:
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        value = loss(layer(x))
    value.backward()
    return [value.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_cross_entropy_equals_stock_without_logits(name, bias, monkeypatch):
    layer, x = head(bias), torch.randn(2, 5, WIDTH)
    twin = copy.deepcopy(layer)
    twin.detach()
    monkeypatch.setattr(Logits, "values", lambda self: pytest.fail("logits were computed"))
    got, want = run(layer, LOSSES[name], x), run(twin, LOSSES[name], x)
    assert got[0].dtype == want[0].dtype
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(got[1:], want[1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OTHER)
def test_anything_else_finds_the_stock_logits(name, monkeypatch):
    layer, x = head(), torch.randn(2, 5, WIDTH)
    twin, calls = copy.deepcopy(layer), []
    twin.detach()
    stock = Head._stock
    monkeypatch.setattr(Head, "_stock", lambda *args: calls.append(1) or stock(*args))
    got, want = run(layer, OTHER[name], x), run(twin, OTHER[name], x)
    assert len(calls) == 1
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1:], want[1:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mean", "none", "softcap", "mneeds"])
@pytest.mark.parametrize("way", ["autocast", "weights"])
def test_low_precision(name, way):
    layer, x = head(), torch.randn(2, 5, WIDTH)
    if way == "weights":
        layer, x = layer.bfloat16(), x.bfloat16()
    twin, loss = copy.deepcopy(layer), (LOSSES | OTHER)[name]
    twin.detach()
    got, want = run(layer, loss, x, way == "autocast"), run(twin, loss, x, way == "autocast")
    assert [t.dtype for t in got] == [t.dtype for t in want]
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b.double()).norm() <= 2e-2 * b.double().norm()


def test_what_is_known_of_logits_needs_none_of_them(monkeypatch):
    monkeypatch.setattr(Logits, "values", lambda self: pytest.fail("logits were computed"))
    logits = head()(torch.randn(2, 5, WIDTH))
    assert logits.shape == (2, 5, CLASSES)
    assert logits.size(-1) == CLASSES
    assert (logits.dim(), len(logits), logits.numel()) == (3, 2, 110)
    assert (logits.dtype, logits.device.type) == (torch.float32, "cpu")
    assert logits.requires_grad
    assert not logits.detach().requires_grad


def test_views_and_casts_have_the_stock_values():
    layer, x = head(), torch.randn(2, 5, WIDTH)
    stock = F.linear(x, layer.weight, layer.bias)
    for change in (
        lambda t: t[:, -1],
        lambda t: t[1, 2:],
        lambda t: t[..., 1:, :],
        lambda t: t[0][...],
        lambda t: t.double()[:, ::2].flatten(0, 1),
        lambda t: t.view(5, 2, -1).reshape(-1, CLASSES),
        lambda t: t.detach(),
    ):
        changed = change(layer(x))
        assert isinstance(changed, Logits)
        assert torch.equal(changed + 0, change(stock))
        assert changed.dtype == change(stock).dtype


def test_copies_of_what_changes_are_made_at_once_or_refused():
    logits = head()(torch.randn(2, 5, WIDTH))
    cast, copied = logits.double(), logits.clone()
    before = copied.detach() + 0
    logits.mul_(2)
    assert torch.equal(copied, before)
    with pytest.raises(UsageError, match="an operation in place changed"):
        cast.sum()


def test_accelerate_may_cast_outputs():
    layer, x = head(), torch.randn(2, 5, WIDTH)
    cast = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(layer.forward))(x)
    assert isinstance(cast, Logits)
    assert cast.dtype == torch.float32
    assert cast.computed is None


def test_a_frozen_weight_gets_no_gradient_and_an_input_without_one_none(monkeypatch):
    from razorctl.layers.heads import token_logits as file

    needs, op = [], file.linear_cross_entropy
    monkeypatch.setattr(
        file, "linear_cross_entropy", lambda *args: needs.append(args[-3:]) or op(*args)
    )
    layer, x = head(), torch.randn(2, 5, WIDTH)
    layer.requires_grad_(False)
    assert not shifted(layer(x)).requires_grad
    assert run(layer, shifted, x)[1].any()
    layer.weight.requires_grad_(True)
    shifted(layer(x)).backward()
    assert needs == [(True, False, False), (False, True, False)]


def test_loss_scales_gradient_accumulation_and_a_second_backward_pass():
    layer, x = head(), torch.randn(2, 5, WIDTH, requires_grad=True)
    loss = shifted(layer(x)) * 1024
    loss.backward(retain_graph=True)
    once = [t.grad.clone() for t in (x, *layer.parameters())]
    loss.backward()
    for t, first in zip((x, *layer.parameters()), once, strict=True):
        torch.testing.assert_close(t.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("name", ["mean", "none", "softcap"])
def test_a_second_derivative_is_refused(name):
    layer, x = head(), torch.randn(2, 5, WIDTH, requires_grad=True)
    (dx,) = torch.autograd.grad((LOSSES | OTHER)[name](layer(x)) ** 2, x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dx.square().sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    layer, x = head(), torch.randn(2, 5, WIDTH)
    want = run(layer, shifted, x)
    layer.zero_grad()
    a = x.clone().requires_grad_()
    loss = checkpoint(lambda t: shifted(layer(t)), a, use_reentrant=reentrant)
    loss.backward()
    got = [loss.detach(), a.grad, *(p.grad for p in layer.parameters())]
    torch.testing.assert_close(got, want)


def test_evaluation_and_no_grad_are_stock():
    layer, x = head(), torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        assert type(layer(x)) is Tensor
    assert type(layer.eval()(x)) is Tensor


@pytest.mark.parametrize("name", ["mean", "softcap"])
def test_compiled_it_is_stock(name):
    layer, x = head(), torch.randn(2, 5, WIDTH)
    loss = (LOSSES | OTHER)[name]
    want = run(layer, loss, x)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(t):
        return loss(layer(t))

    layer.zero_grad()
    a = x.clone().requires_grad_()
    value = step(a)
    value.backward()
    torch.testing.assert_close(
        [value.detach(), a.grad, *(p.grad for p in layer.parameters())], want
    )


def test_logits_of_weights_that_are_gone_are_refused():
    layer, x = head(), torch.randn(2, 5, WIDTH)
    early, late = layer(x), layer(x)
    values = early.tanh()
    torch.optim.SGD(layer.parameters(), 0.1).step(lambda: shifted(layer(x)).backward())
    assert torch.equal(early.tanh(), values)
    with pytest.raises(UsageError, match="before it"):
        late.argmax(-1)


def test_copies_and_pickles_keep_working():
    layer, x = nn.Sequential(head()), torch.randn(2, 5, WIDTH)
    want = run(layer, shifted, x)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(twin[0], Head)
        torch.testing.assert_close(run(twin, shifted, x), want)


def test_saved_bytes_are_two_hidden_states():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = head()

        def forward(self, x, target):
            logits = self.head(x)
            return F.cross_entropy(logits.view(-1, CLASSES), target), logits

    x, target = torch.randn(2, 5, WIDTH, requires_grad=True), TARGET.flatten()
    # The input, for whoever takes the logits, and its gradient; the divisor of the mean. The
    # gradient of the weight is one already.
    assert traced_bytes(Model(), (x, target)) == x.nbytes * 2 + head().bias.nbytes + 8
