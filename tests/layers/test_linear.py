"""RazorLinear against the oracle of its rule and against nn.Linear, for every rule."""

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from razorctl import Recipe, sparsify
from razorctl.layers.linear import RazorLinear
from razorctl.rules import RULES, Rule

SHAPES = [(5, 33), (3, 7, 33), (1, 33), (2, 3, 5, 33), (33,)]
PRECISIONS = [None, torch.bfloat16]
TOLERANCE = {None: 1e-5, torch.bfloat16: 2e-2}
every_rule = pytest.mark.parametrize("name", RULES)


def razor(rule: Rule, bias: bool = True, device: torch.device | str = "cpu") -> RazorLinear:
    layer = nn.Linear(33, 17, bias=bias, device=device)
    layer.__class__ = RazorLinear
    layer.rule, layer.blocks, layer.block = rule, None, 0
    return layer


def oracle(x: Tensor, weight: Tensor, bias: Tensor | None, rule: Rule) -> Tensor:
    """Exact output, with the weight's gradient from what `rule` restores."""
    y = F.linear(x, weight.detach(), bias)
    rows = x.detach().reshape(-1, x.shape[-1])
    stand_in = rule.restore(rule.keep(rows), rows.shape).view(x.shape)
    g = F.linear(stand_in, weight)
    return y + (g - g.detach())


def run(forward, x: Tensor, layer: nn.Linear, precision: torch.dtype | None) -> list[Tensor]:
    """Output and the gradients of input, weight and bias."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(7)
    with torch.autocast(x.device.type, precision, enabled=precision is not None):
        y = forward(x)
    cotangent = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
    y.backward(cotangent.to(y.dtype))
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()


@every_rule
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("unbiased", [False, True])
def test_gradients_equal_the_oracle(name, shape, precision, unbiased, device):
    rule = RULES[name](33, 0.3, unbiased)
    layer, x = razor(copy.deepcopy(rule), device=device), torch.randn(shape, device=device)

    def reference(x: Tensor) -> Tensor:
        if precision is None:
            return oracle(x, layer.weight, layer.bias, rule)
        with torch.autocast(device.type, enabled=False):
            cast = [t.to(precision) for t in (x, layer.weight, layer.bias)]
            return oracle(*cast, rule)

    want = run(reference, x, layer, precision)
    got = run(layer, x, layer, precision)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert distance(a, b) < TOLERANCE[precision]


@every_rule
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_input_and_bias_gradients_are_bitwise_stock(name, shape, precision, device):
    layer, x = razor(RULES[name](33, 0.2, False), device=device), torch.randn(shape, device=device)
    y, dx, _, db = run(layer, x, layer, precision)
    layer.__class__ = nn.Linear
    stock_y, stock_dx, _, stock_db = run(layer, x, layer, precision)
    assert torch.equal(y, stock_y)
    assert torch.equal(dx, stock_dx)
    assert torch.equal(db, stock_db)


@pytest.mark.parametrize("method", ["backrazor", "prebackrazor-", "prebackrazor"])
def test_ratio_zero_is_bitwise_stock(method):
    model = nn.Sequential(nn.Linear(33, 17))
    x = torch.randn(3, 7, 33)
    want = run(model, x, model[0], None)
    sparsify(model, Recipe(method, ratio=0))
    for a, b in zip(run(model, x, model[0], None), want, strict=True):
        assert torch.equal(a, b)


@every_rule
def test_without_bias(name):
    layer, x = razor(RULES[name](33, 0.3, False), bias=False), torch.randn(4, 33)
    layer(x).sum().backward()
    assert layer.weight.grad.any()


@every_rule
def test_frozen_parts_save_nothing_and_get_no_gradient(name):
    layer = razor(RULES[name](33, 0.3, False))
    layer.weight.requires_grad_(False)
    x = torch.randn(4, 33, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    assert [t.data_ptr() for t in saved] == [layer.weight.data_ptr()]
    y.sum().backward()
    assert layer.weight.grad is None
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(4, 33))

    layer.weight.requires_grad_(True)
    layer.bias.requires_grad_(False)
    layer(torch.randn(4, 33)).sum().backward()  # an input without gradient
    assert layer.weight.grad.any()
    assert layer.bias.grad.sum() == 4 * 17


@every_rule
@pytest.mark.parametrize("unbiased", [False, True])
def test_compiled_steps_equal_eager_ones(name, unbiased, device):
    eager = nn.Sequential(*(razor(RULES[name](33, 0.3, unbiased), device=device) for _ in range(2)))
    eager.insert(1, nn.Linear(17, 33, device=device))
    twin = copy.deepcopy(eager)
    torch.compiler.reset()
    # With a partitioner, which must not make a draw anew in the backward pass.
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for step in range(3):  # what the first steps teach the sampler shows in the next draws
        x = torch.randn(6, 33, device=device)
        for model, forward in ((eager, eager), (twin, compiled)):
            model.zero_grad()
            torch.manual_seed(step)
            forward(x).square().sum().backward()
        for a, b in zip(eager.parameters(), twin.parameters(), strict=True):
            assert distance(b.grad, a.grad) < 1e-6


class TestMemo:
    def three(self, method: str) -> nn.Module:
        class Split(nn.Module):
            def __init__(self):
                super().__init__()
                self.parts = nn.ModuleList(nn.Linear(33, 17) for _ in "qkv")

            def forward(self, x, change=False):
                first = self.parts[0](x)
                if change:
                    x.mul_(2)
                return first + self.parts[1](x) * self.parts[2](x)

        model = Split()
        sparsify(model, Recipe(method, ratio=0.5))
        return model

    @pytest.mark.parametrize("method", ["backrazor", "prebackrazor"])
    def test_gradients_are_those_of_the_rule_of_the_first(self, method):
        model, x = self.three(method), torch.randn(6, 33)
        rule = copy.deepcopy(model.parts[0].rule)
        model(x).sum().backward()
        stand_in = rule.restore(rule.keep(x), x.shape)
        outputs = [part(x).detach() for part in model.parts]
        want = [torch.ones(6, 17), outputs[2], outputs[1]]
        for part, dy in zip(model.parts, want, strict=True):
            torch.testing.assert_close(part.weight.grad, dy.T @ stand_in)

    def test_a_change_in_place_is_another_input(self):
        model, x = self.three("backrazor"), torch.randn(6, 33)
        dense = x.clone()
        model(x, change=True).sum().backward()
        rule = model.parts[0].rule
        first = rule.restore(rule.keep(dense), x.shape)
        torch.testing.assert_close(model.parts[0].weight.grad, torch.ones(17, 6) @ first)
        later = rule.restore(rule.keep(2 * dense), x.shape)
        dy = model.parts[2](2 * dense).detach()
        torch.testing.assert_close(model.parts[1].weight.grad, dy.T @ later)

    def test_nothing_is_held_once_the_input_is_gone(self):
        model = self.three("backrazor")
        loss = model(torch.randn(6, 33)).sum()
        assert model.parts[0].memo._entry is None
        del loss

    @pytest.mark.parametrize("method", ["backrazor", "full"])
    def test_a_model_can_be_collected(self, method):
        model = nn.Sequential(nn.Linear(33, 33), nn.GELU(), nn.Linear(33, 17))
        sparsify(model, Recipe(method, ratio=0.5, joint_budget=0.5))
        for _ in range(3):
            model(torch.randn(6, 33)).sum().backward()
        weight = weakref.ref(model[2].weight)
        del model
        gc.collect()
        assert weight() is None

    def test_the_same_tensor_is_another_input_in_another_pass(self):
        layer, x = nn.Linear(33, 17), torch.randn(6, 33)
        sparsify(layer, Recipe("prebackrazor"))
        drawn = set()
        for _ in range(20):
            layer.zero_grad()
            layer(x).sum().backward()
            drawn.add(tuple(layer.weight.grad.any(0).tolist()))
        assert len(drawn) > 5

    def test_another_precision_is_another_input(self):
        layers, x = [nn.Linear(33, 17) for _ in "ab"], torch.randn(6, 33)
        model = nn.ModuleList(layers)
        sparsify(model, Recipe("backrazor"))
        with torch.autocast("cpu", torch.bfloat16):
            y = layers[0](x)
        (y.float() + layers[1](x)).sum().backward()
        assert all(layer.weight.grad.dtype == torch.float32 for layer in layers)
