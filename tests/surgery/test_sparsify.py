import copy
import importlib

import pytest
import torch
from timm import layers as stock
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from razorctl import Recipe, recipe_of, restore, sparsify
from razorctl.errors import UsageError
from razorctl.layers.base import RazorLayer
from razorctl.layers.by_type import LIBRARIES, swaps
from razorctl.layers.kinds.linear import Linear
from razorctl.methods import METHODS

pruning = pytest.mark.parametrize("method", [name for name, m in METHODS.items() if m.prunes])


class OwnAttention(nn.MultiheadAttention):
    pass


class Subclassed(nn.Linear):
    pass


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 5)
    )


def batch() -> torch.Tensor:
    return torch.randn(6, 1, 4, 4)


@pruning
def test_swaps_in_place_and_back(method):
    net = model()
    before = dict(net.named_parameters())
    keys, types = list(net.state_dict()), [type(m) for m in net.modules()]
    calls = []
    net[2].register_forward_hook(lambda *_: calls.append(1))

    classifier = () if METHODS[method].skips_outputs else ("4",)
    assert sparsify(net, Recipe(method)) == ("0", "2", "3", *classifier)
    assert isinstance(net[2], nn.Linear)
    assert isinstance(net[2], Linear)
    assert list(net.state_dict()) == keys
    assert all(p is before[name] for name, p in net.named_parameters())
    net(batch()).sum().backward()
    assert calls == [1]

    restore(net)
    assert [type(m) for m in net.modules()] == types
    assert all(p is before[name] for name, p in net.named_parameters())
    assert not {"rules", "memo", "blocks", "block", "int8_input_grad"} & set(vars(net[2]))
    restore(net)  # nothing to undo is no error


@pruning
def test_only_exact_types_are_swapped(method):
    net = nn.Sequential(Subclassed(4, 4), nn.Linear(4, 4))
    assert sparsify(net, Recipe(method)) == ("1",)


@pytest.mark.parametrize(
    ("net", "recipe", "message"),
    [
        (nn.Bilinear(1, 1, 1), Recipe("backrazor"), "no layer of Bilinear can be pruned"),
        (
            nn.Linear(2, 2),
            Recipe(joint_budget=0.5, joint="branches"),
            "no trainable residual branch that",
        ),
        (nn.Linear(2, 2), Recipe(attention="flash"), "Linear cannot run with attention 'flash'"),
        (nn.Linear(2, 2), Recipe("full", attention="sparse-flash"), "choose attention 'flash'"),
        (nn.Linear(2, 2), Recipe("checkpoint"), "has no activation checkpointing of its own"),
        (nn.ReLU(), Recipe("head"), "ReLU has no last layer to train"),
        (
            nn.Sequential(nn.Linear(8, 8), OwnAttention(8, 2)),
            Recipe(attention="flash"),
            "^1 cannot run with attention 'flash'; choose attention 'auto'",
        ),
        (
            nn.Sequential(stock.Attention(8, 2), stock.Attention(8, 2, attn_head_dim=264)),
            Recipe("backrazor", attention="flash"),
            "^1 has heads of 264 columns .* choose attention 'stored'",
        ),
    ],
    ids=[
        "nothing",
        "branches",
        "attention",
        "full",
        "checkpoint",
        "head",
        "eager only",
        "wide heads",
    ],
)
def test_what_cannot_be_honored_is_refused_before_any_change(net, recipe, message):
    with pytest.raises(UsageError, match=message):
        sparsify(net, recipe)
    assert not any(isinstance(m, RazorLayer) for m in net.modules())
    assert not net._forward_pre_hooks
    assert not any({"rules", "backend", "memo"} & set(vars(m)) for m in net.modules())


def test_wide_heads_are_compressed_where_no_attention_is_named():
    net, x = nn.Sequential(stock.Attention(8, 2, attn_head_dim=264)).train(), torch.randn(2, 4, 8)
    y, grad = net(x), torch.randn(2, 4, 8)
    want = torch.cat([g.flatten() for g in torch.autograd.grad(y, list(net.parameters()), grad)])
    assert "0" in sparsify(net)
    again = net(x)
    assert torch.equal(again, y)
    got = torch.autograd.grad(again, list(net.parameters()), grad)
    assert torch.cosine_similarity(torch.cat([g.flatten() for g in got]), want, 0) > 0.999


def test_twice_is_refused():
    net = model()
    sparsify(net)
    with pytest.raises(UsageError, match="restore"):
        sparsify(net)


class TestJointBudget:
    def net(self, budget: float, **options) -> nn.Sequential:
        layers = [nn.Linear(8, 8) for _ in range(10)]
        net = nn.Sequential(*layers)
        sparsify(net, Recipe("prebackrazor-", ratio=0.5, joint_budget=budget, **options))
        return net

    @pytest.mark.parametrize(("budget", "drawn"), [(0.3, 3), (0.01, 1)])
    def test_undrawn_weights_get_no_gradient_and_save_nothing(self, budget, drawn):
        net = self.net(budget)
        for _ in range(5):
            net.zero_grad()
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, saved=saved: saved.append(t) or t, lambda t: t
            ):
                loss = net(torch.randn(4, 8)).sum()
            loss.backward()
            with_gradient = [m.weight.grad is not None for m in net]
            assert sum(with_gradient) == drawn
            assert all(m.bias.grad is not None for m in net)
            weights = {m.weight.data_ptr() for m in net}
            activations = [
                t for t in saved if t.data_ptr() not in weights and t.is_floating_point()
            ]
            assert len(activations) == drawn

    def test_input_gradient_is_exact(self):
        net = self.net(0.3)
        x = torch.randn(4, 8, requires_grad=True)
        net(x).square().sum().backward()
        got, x.grad = x.grad, None
        restore(net)
        net(x).square().sum().backward()
        assert torch.equal(got, x.grad)

    def test_unbiased_scales_by_one_over_p(self):
        x = torch.randn(4, 8)
        grads = []
        for unbiased in (False, True):
            torch.manual_seed(0)
            net = self.net(0.3, unbiased=unbiased)
            net(x).sum().backward()
            grads.append([m.weight.grad for m in net])
        for plain, scaled in zip(*grads, strict=True):
            assert (plain is None) == (scaled is None)
            if plain is not None:
                assert torch.allclose(scaled, plain / 0.3)


def test_every_swap_is_a_razor_layer():
    for library in LIBRARIES:
        importlib.import_module(f"razorctl.layers.libraries.{library}")
    assert len(swaps()) > 20
    for razor in swaps().values():
        assert issubclass(razor, RazorLayer)
        assert razor.kind
        assert razor.__doc__


class TestBudgetWithout:
    def test_weights(self):
        net = nn.Sequential(nn.GELU(), nn.LayerNorm(8))
        for method in ("backrazor", "full"):
            with pytest.raises(UsageError, match=r"no trainable weight.*joint_budget to 1"):
                sparsify(net, Recipe(method, joint_budget=0.5))

    def test_a_call_of_the_model_itself(self):
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        sparsify(net, Recipe("backrazor", joint_budget=0.5))
        with pytest.raises(UsageError, match="call the model"):
            net[0](torch.randn(2, 8))

    def test_frozen_weights(self):
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
        net[:9].requires_grad_(False)
        sparsify(net, Recipe("backrazor", joint_budget=0.5))
        for _ in range(5):
            net.zero_grad()
            net(torch.randn(2, 8)).sum().backward()
            assert net[9].weight.grad.any()

    def test_a_second_draw_in_checkpointing(self):
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        sparsify(net, Recipe("full", joint_budget=0.5))
        x = torch.randn(2, 8, requires_grad=True)
        checkpoint(net, x, use_reentrant=False).sum().backward()
        assert sum(layer.weight.grad is not None for layer in net) == 3


def test_a_joint_budget_is_refused_by_a_whole_graph_and_runs_uncompiled_otherwise():
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    twin = copy.deepcopy(eager)
    x = torch.randn(4, 8)
    for model in (eager, twin):
        sparsify(model, Recipe("full", joint_budget=0.5))
    torch.compiler.reset()
    with pytest.raises((UsageError, torch._dynamo.exc.TorchDynamoException), match="joint budget"):
        torch.compile(twin, backend="aot_eager", fullgraph=True)(x)
    compiled = torch.compile(twin, backend="aot_eager")
    for _ in range(4):
        for model, forward in ((eager, eager), (twin, compiled)):
            model.zero_grad()
            forward(x).square().sum().backward()
        for a, b in zip(eager.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_a_model_knows_its_recipe_until_it_is_restored():
    model, recipe = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), Recipe("backrazor", 0.5)
    assert recipe_of(model) is None
    sparsify(model, recipe)
    assert recipe_of(model) == recipe
    restore(model)
    assert recipe_of(model) is None


def test_a_parametrized_module_is_only_called_by_its_own_forward():
    net = model()
    parametrizations.spectral_norm(net[2])  # its weight changes whenever it is read
    before = {name: t.clone() for name, t in net.state_dict().items()}
    sparsify(net, Recipe())
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())


def test_a_razor_layer_that_is_parametrized_runs_stock_and_is_restored_so():
    net = model().train()
    twin = copy.deepcopy(net)
    sparsify(net, Recipe())
    x = batch()
    for each in (net, twin):
        torch.manual_seed(0)
        parametrizations.spectral_norm(each[2])
    assert all(torch.equal(net(x), twin(x)) for _ in "abc")
    restore(net)
    assert torch.equal(net(x), twin(x))
    assert isinstance(net[2].parametrizations.weight, nn.ModuleList)
    parametrize.remove_parametrizations(net[2], "weight")
    assert type(net[2]) is nn.Linear
