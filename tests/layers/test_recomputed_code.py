"""Attention and experts of any code, which runs again in the backward pass between its layers."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer_v2 import SwinTransformerV2
from torch import Tensor, nn

from razorctl import Recipe, restore, sparsify
from razorctl.errors import UsageError
from razorctl.layers.base import LayerSettings
from razorctl.layers.kinds.linear import Linear
from razorctl.layers.recompute import replayed_state
from razorctl.layers.recompute.attention import AttentionAgain
from razorctl.memory.saved import kept_storages, traced_bytes
from razorctl.rules.quantized import Quantized
from razorctl.rules.registry import RULES, RuleSettings
from razorctl.surgery import reruns
from razorctl.surgery.byte_budget import sparsify_within
from tests.cases import both


class GatedAttention(nn.Module):
    """Attention with a position bias, capped scores, a gate, and a count of its calls."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in "qkvo")
        self.position = nn.Parameter(torch.randn(3, 8, 8))
        self.cap = nn.Parameter(torch.tensor(3.0))
        self.p, self.calls = p, 0

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        q, k, v = (
            part(x).unflatten(-1, (3, 8)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        scores = self.cap * torch.tanh(q @ k.transpose(-2, -1) / self.cap) + self.position
        if mask is not None:
            scores = scores + mask
        y = F.dropout(scores.softmax(-1), self.p, self.training) @ v
        return self.o(y.transpose(1, 2).flatten(2) * x.sigmoid())


def attached(module: nn.Module, bits: str = "4-bit") -> nn.Module:
    """The attention with a rule for what its layers return; these keep all that they get."""
    rules, exact = (both(RULES[name].build(RuleSettings(24, 0.0))) for name in (bits, "dense"))
    for part in (module.q, module.k, module.v, module.o):
        Linear.attach(part, exact, LayerSettings())
    AttentionAgain.attach(module, rules, LayerSettings())
    return module.train()


def gradients(module: nn.Module, x: Tensor, *args: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(3)
    y = module(x * 1, *args)
    y.backward(torch.ones_like(y).cumsum(-1).cos())
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in module.named_parameters()}


def at_copies(part: nn.Module, args: object, y: Tensor) -> Tensor:
    """A hook: the values of a copy of 4 bits, with the gradient of what it is of."""
    values = Quantized(4).pack(y.detach().flatten(0, -2)).values().view(y.shape)
    return values + (y - y.detach())


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_the_gradient_is_that_of_the_code_at_the_values_of_copies(p):
    torch.manual_seed(0)
    module, x = GatedAttention(p).train(), torch.randn(4, 8, 24)
    mask = torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1) > 0, -1e4)
    want = gradients(module, x, mask)["y"]
    hooks = [part.register_forward_hook(at_copies) for part in (module.q, module.k, module.v)]
    # The gate reads a copy of x; the layers get x itself.
    hooks += [
        part.register_forward_pre_hook(lambda part, args: (x + (args[0] - args[0].detach()),))
        for part in (module.q, module.k, module.v)
    ]
    values = Quantized(4).pack(x.flatten(0, -2)).values().view(x.shape)
    oracle = gradients(module, values, mask)
    for hook in hooks:
        hook.remove()
    got = gradients(attached(module), x, mask)
    assert torch.equal(got.pop("y"), want)
    del oracle["y"]
    for name in oracle.keys() - {"o.weight"}:  # of what the last layer got in the first run
        torch.testing.assert_close(got[name], oracle[name], atol=1e-4, rtol=1e-4, msg=name)


def test_two_backward_passes_of_one_graph_and_none():
    module, x = attached(GatedAttention(0.3)), torch.randn(4, 8, 24)
    gc.collect()
    gc.disable()
    try:
        y = module(x)
        kept = [weakref.ref(t) for t in gc.get_objects() if isinstance(t, Tensor)]
        first, second = (
            torch.autograd.grad(y.sum(), list(module.parameters()), retain_graph=True) for _ in "ab"
        )
        assert all(map(torch.equal, first, second))
        before = sum(ref() is not None for ref in kept)
        del y, first, second
        assert sum(ref() is not None for ref in kept) < before  # without a garbage collector
        y = module(x)
        del y
    finally:
        gc.enable()


class AdditiveAttention(nn.Module):
    """Attention whose last layer gets the sum of another one's output and a query."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.p, self.o = (nn.Linear(24, 24) for _ in "qkpo")

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        y: Tensor = self.o(self.p(q.softmax(1).sum(1, keepdim=True) * k) + q)
        return y


def test_a_layer_may_get_a_sum_of_what_another_returned():
    model, x = nn.Sequential(AdditiveAttention(), nn.Linear(24, 24)), torch.randn(4, 8, 24)
    want = gradients(model.train(), x)
    sparsify(model, Recipe(ratio=0.9))
    assert isinstance(model[0], AttentionAgain)
    got = gradients(model, x)
    for name, gradient in got.items():
        assert F.cosine_similarity(gradient.flatten(), want[name].flatten(), 0) > 0.98, name


def test_the_graph_holds_no_argument_and_finds_a_changed_weight():
    module, x = attached(GatedAttention()), torch.randn(4, 8, 24, requires_grad=True) * 1
    y = module(x)
    freed = weakref.ref(x)
    del x
    assert freed() is None
    module.position.detach().zero_()
    with pytest.raises(UsageError, match=r"\(GatedAttention\) was changed in place"):
        y.sum().backward()


class ChangedAttention(GatedAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, mask).softmax(-1)
        x.add_(1)
        return y * y


class MovingAttention(GatedAttention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(x, mask).softmax(-1)
        return (y * y) * y if self.calls == 1 else y


def test_code_that_cannot_run_again_is_refused():
    x = torch.randn(4, 8, 24, requires_grad=True)
    with pytest.raises(UsageError, match=r"\(ChangedAttention\) changes an argument in place"):
        attached(ChangedAttention())(x * 1)
    y = attached(MovingAttention())(x)
    with pytest.raises(UsageError, match=r"\(MovingAttention\) executes different operations"):
        y.sum().backward()


def swin(kind: type[nn.Module] = SwinTransformer) -> tuple[nn.Module, Tensor]:
    sizes = {"img_size": 32, "patch_size": 2, "embed_dim": 32, "depths": (2,), "num_heads": (2,)}
    model = kind(**sizes, window_size=4).train()
    for parameter in model.parameters():
        if not parameter.detach().any():  # it would let no gradient pass, or hide a wrong one
            nn.init.normal_(parameter, std=0.1)
    return model, torch.randn(4, 3, 32, 32)


@pytest.mark.parametrize(("kind", "most"), [(SwinTransformer, 0.3), (SwinTransformerV2, 0.5)])
def test_windows_of_timm(kind, most):
    model, x = swin(kind)
    full, want = traced_bytes(model, x), gradients(model, x)
    sparsify(model, Recipe(ratio=0.9))
    got = gradients(model, x)
    assert torch.equal(got["y"], want["y"])
    for name in want.keys() - {"x"}:
        if want[name].norm() > 1e-3:
            assert F.cosine_similarity(got[name].flatten(), want[name].flatten(), 0) > 0.97, name
    assert any(type(m).__name__ == "RazorWindowAttention" for m in model.modules())
    traced = traced_bytes(model, x)
    assert traced < most * full
    model(x)  # which shows the output layers
    with torch.no_grad():
        next(model.parameters()).add_(0)  # as a step does
    kept = kept_storages(model, lambda: model(x), lambda: None)
    assert sum(storage.size for storage in kept) == traced


def test_attention_stays_stock_under_a_loose_byte_budget(caplog):
    model, inputs = swin()
    full, kinds = traced_bytes(model, inputs), {}
    for ratio in (0.5, 0.6):
        sparsify(model, Recipe(ratio=ratio))
        kinds[ratio] = [isinstance(m, AttentionAgain) for m in model.modules()]
        kept = traced_bytes(model, inputs)
        assert kept < 0.5 * full
        restore(model)
    assert not any(kinds[0.5])
    assert any(kinds[0.6])
    assert "unknown attention" not in caplog.text
    sparsify_within(model, Recipe(ratio=0.5), inputs, full=full // 2)  # rules of a larger ratio
    assert any(isinstance(m, AttentionAgain) for m in model.modules())
    assert not any(map(reruns.attached, model.modules()))


def test_a_cuda_graph_has_code_that_draws_nothing_on_the_card(monkeypatch):
    """A capture cannot read the state of the card's generator; the runs before it could."""
    card, states, capturing = torch.device("cuda"), [0], [False]

    def random_state(device):
        if capturing[0] and device == card:
            raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during capture")
        return torch.tensor(states if device == card else [0])

    monkeypatch.setattr(replayed_state, "random_state", random_state)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    owner, argument = nn.Linear(2, 2), SimpleNamespace(device=card)

    def run(draws):
        context = replayed_state.Context(owner, "owner", (), [argument])
        states[0] += draws
        context.end()
        return [device.type for _, device in context.random]

    def captured():
        capturing[0] = True
        try:
            return run(0)
        finally:
            capturing[0] = False

    with pytest.raises(RuntimeError, match="current_seed"):
        captured()  # which no run has come before
    assert run(0) == ["cpu", "cuda"]
    assert captured() == captured() == ["cpu"]
    assert run(1) == ["cpu", "cuda"]
    with pytest.raises(RuntimeError, match="current_seed"):
        captured()
