"""RazorLinear against the oracle of its rule and against nn.Linear, for every rule."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from razorctl import Recipe, restore, sparsify
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
    layer, x = razor(rule, device=device), torch.randn(shape, device=device)

    def reference(x: Tensor) -> Tensor:
        if precision is None:
            return oracle(x, layer.weight, layer.bias, rule)
        with torch.autocast(device.type, enabled=False):
            cast = [t.to(precision) for t in (x, layer.weight, layer.bias)]
            return oracle(*cast, rule)

    want = run(reference, x, layer, precision)  # first: the layer's backward teaches the sampler
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


@every_rule
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_everything_kept_equals_stock(name, precision, device):
    layer = razor(RULES[name](33, 1.0, True), device=device)
    x = torch.randn(3, 7, 33, device=device)
    got = run(layer, x, layer, precision)
    layer.__class__ = nn.Linear
    tolerance = max(TOLERANCE[precision], 1e-3 if name == "half" else 0)
    for a, b in zip(got, run(layer, x, layer, precision), strict=True):
        assert distance(a, b) < tolerance


@pytest.mark.parametrize("method", ["backrazor", "prebackrazor-", "prebackrazor"])
def test_ratio_zero_is_bitwise_stock(method):
    model = nn.Sequential(nn.Linear(33, 17))
    x = torch.randn(3, 7, 33)
    want = run(model, x, model[0], None)
    sparsify(model, Recipe(method, ratio=0))
    for a, b in zip(run(model, x, model[0], None), want, strict=True):
        assert torch.equal(a, b)


@every_rule
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16, torch.float64])
def test_low_and_high_precision_modules(name, precision, device):
    layer = razor(RULES[name](33, 0.3, True), device=device).to(precision)
    x = torch.randn(4, 33, device=device, dtype=precision, requires_grad=True)
    layer(x).square().mean().backward()
    for grad in (x.grad, layer.weight.grad, layer.bias.grad):
        assert grad.dtype == precision
        assert grad.isfinite().all()


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
def test_evaluation_and_no_grad_are_stock(name):
    layer = razor(RULES[name](33, 0.3, False))
    layer.rule = None  # whoever asks it fails
    x = torch.randn(4, 33, requires_grad=True)
    with torch.no_grad():
        assert not layer(x).requires_grad
    assert "LinearFunction" not in layer.eval()(x).grad_fn.name()


@every_rule
@pytest.mark.parametrize("value", [0.0, 1.0, 1e30])
def test_degenerate_inputs_give_finite_gradients(name, value, device):
    layer = razor(RULES[name](33, 0.3, True), device=device)
    for _ in range(3):
        x = torch.full((6, 33), value, device=device, requires_grad=True)
        layer(x).mean().backward()
    assert layer.weight.grad.isfinite().all()
    assert x.grad.isfinite().all()


@every_rule
def test_on_the_meta_device(name):
    # Nothing there has a value, so this also shows that a step never waits for the device.
    layer = razor(RULES[name](33, 0.3, True), device="meta")
    x = torch.randn(3, 5, 33, device="meta", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape
    assert layer.weight.grad.shape == (17, 33)


def test_backward_under_autocast_is_the_same():
    x = torch.randn(4, 33, requires_grad=True)
    grads = []
    for inside in (False, True):
        torch.manual_seed(0)
        layer = razor(RULES["columns-bandit"](33, 0.3, False))
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            with torch.autocast("cpu", enabled=False):
                y = layer(x)
            y.square().sum().backward()
        grads.append(layer.weight.grad)
    assert torch.equal(*grads)


def test_an_empty_batch():
    for name in RULES:
        layer = razor(RULES[name](33, 0.3, True))
        layer(torch.zeros(0, 33)).sum().backward()
        assert torch.equal(layer.weight.grad, torch.zeros(17, 33))


@every_rule
def test_accumulation_adds(name):
    layer, x = razor(RULES[name](33, 0.3, False)), torch.randn(2, 4, 33)
    torch.manual_seed(0)
    grads = []
    for part in x:
        layer.zero_grad()
        layer(part).square().sum().backward()
        grads.append(layer.weight.grad.clone())
    torch.manual_seed(0)
    layer.rule = RULES[name](33, 0.3, False)
    layer.zero_grad()
    for part in x:
        layer(part).square().sum().backward()
    assert torch.allclose(layer.weight.grad, grads[0] + grads[1], rtol=1e-5, atol=1e-5)


@every_rule
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_the_draw(name, reentrant):
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(6, 33, requires_grad=True)
    plain = razor(RULES[name](33, 0.3, True))
    twin = copy.deepcopy(plain)
    torch.manual_seed(5)
    plain(x).square().sum().backward()
    torch.manual_seed(5)
    checkpoint(twin, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(plain.weight.grad, twin.weight.grad)


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


def test_a_second_derivative_is_refused():
    layer = razor(RULES["topk"](33, 0.3, False))
    x = torch.randn(4, 33, requires_grad=True)
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@every_rule
def test_copies_and_pickles_keep_working(name):
    model = nn.Sequential(nn.Linear(33, 17))
    sparsify(model, Recipe("prebackrazor"))
    model[0].rule = RULES[name](33, 0.3, False)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin[0]) is RazorLinear
        twin(torch.randn(4, 33)).sum().backward()
        assert twin[0].weight.grad.any()
        assert twin[0].weight is not model[0].weight
        restore(twin)
        assert type(twin[0]) is nn.Linear


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
        torch.manual_seed(3)
        model(x).sum().backward()
        torch.manual_seed(3)
        rule = copy.deepcopy(model.parts[0].rule)
        if method == "prebackrazor":
            rule.sampler = type(rule.sampler)(33, rule.sampler.count)
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
