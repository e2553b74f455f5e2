"""Razor linear layers against the oracle of its rule and against nn.Linear, for every rule."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from razorctl import Recipe, sparsify
from razorctl.layers.base import LayerSettings
from razorctl.layers.kinds.linear import Gemms, Linear
from razorctl.rules.base import Rule
from razorctl.rules.prune import Centered
from razorctl.rules.quantized import Quantized
from razorctl.rules.registry import RULES, RuleSettings
from tests.cases import both
from tests.kept import saved

SHAPES = [(3, 7, 33), (33,)]
PRECISIONS = [None, torch.bfloat16]


def razor(rule: Rule, bias: bool = True, device: torch.device | str = "cpu") -> Linear:
    layer = nn.Linear(33, 17, bias=bias, device=device)
    Linear.attach(layer, both(rule), LayerSettings())
    return layer


def oracle(x: Tensor, weight: Tensor, bias: Tensor | None, rule: Rule) -> Tensor:
    """Exact output, with the weight's gradient from what `rule` restores."""
    y = F.linear(x, weight.detach(), bias)
    rows = x.detach().reshape(-1, x.shape[-1])
    stand_in = rule.pack(rows).values().view(x.shape)
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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("name", ["topk", "3-bit", "columns-bandit"])
def test_gradients_equal_the_oracle_under_autocast(name, shape, unbiased, device):
    rule = RULES[name].build(RuleSettings(33, 0.3, unbiased))
    layer, x = razor(copy.deepcopy(rule), device=device), torch.randn(shape, device=device)

    def reference(x: Tensor) -> Tensor:
        with torch.autocast(device.type, enabled=False):
            return oracle(*(t.bfloat16() for t in (x, layer.weight, layer.bias)), rule)

    want = run(reference, x, layer, torch.bfloat16)
    for a, b in zip(run(layer, x, layer, torch.bfloat16), want, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert distance(a, b) < 2e-2


@pytest.mark.parametrize("method", ["backrazor", "prebackrazor-", "prebackrazor"])
def test_ratio_zero_is_bitwise_stock(method):
    model = nn.Sequential(nn.Linear(33, 17))
    x = torch.randn(3, 7, 33)
    want = run(model, x, model[0], None)
    sparsify(model, Recipe(method, ratio=0))
    for a, b in zip(run(model, x, model[0], None), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["topk", "columns-bandit"])
def test_frozen_parts_save_nothing_and_get_no_gradient(name):
    layer = razor(RULES[name].build(RuleSettings(33, 0.3, False)))
    layer.weight.requires_grad_(False)
    x = torch.randn(4, 33, requires_grad=True)
    assert [t.data_ptr() for t in saved(layer, x)] == [layer.weight.data_ptr()]
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert torch.allclose(x.grad, layer.weight.sum(0).expand(4, 33))

    layer.weight.requires_grad_(True)
    layer.bias.requires_grad_(False)
    layer(torch.randn(4, 33)).sum().backward()  # an input without gradient
    assert layer.weight.grad.any()
    assert layer.bias.grad.sum() == 4 * 17


def int8(x: Tensor, dim: int) -> Tensor:
    """`x` as 8-bit copies have it: in steps of a 127th of the largest along `dim`."""
    scale = x.abs().amax(dim, keepdim=True).clamp(min=1e-30) / 127
    return (x / scale).round() * scale


class TestInt8:
    @pytest.fixture(autouse=True)
    def whatever_the_size(self, monkeypatch):
        monkeypatch.setattr(Linear, "SMALLEST", 0)

    def layer(self, name: str, weight: bool, inputs: bool, device="cpu") -> Linear:
        rule = RULES[name].build(RuleSettings(33, 0.3))
        layer = razor(rule, device=device)
        layer.int8_weight_grad, layer.int8_input_grad = weight, inputs
        return layer

    @pytest.mark.parametrize(
        ("name", "weight", "inputs"),
        [
            *((name, True, False) for name in ("dense", "8-bit", "2-bit", "columns-norm")),
            ("4-bit", False, True),
            ("4-bit", True, True),
        ],
    )
    @pytest.mark.parametrize("precision", PRECISIONS, ids=str)
    def test_each_gemm_is_that_of_the_copies_where_it_is_switched_on(
        self, name, weight, inputs, precision, device
    ):
        layer = self.layer(name, weight, inputs, device)
        rule, x = copy.deepcopy(layer.rules.wide), torch.randn(40, 33, device=device)
        _, dx, dw, db = run(layer, x, layer, precision)
        torch.manual_seed(7)
        dtype = precision or torch.float32
        stand_in = rule.pack(x.to(dtype)).values().float()
        dy = torch.linspace(-1, 1, 40 * 17, device=device).view(40, 17).to(dtype).float()
        w = layer.weight.detach().to(dtype).float()
        tolerance = 2e-2 if precision else 1e-5
        want_dx = int8(dy, 1) @ int8(w, 0) if inputs else dy @ w
        assert distance(dx, want_dx) < tolerance
        # Both operands of dW are rounded to 8 bits, each with half of the spread of the rows of dy.
        assert distance(dw, dy.T @ stand_in) < (tolerance + 2e-2 if weight else tolerance)  # .009
        assert distance(db, dy.sum(0)) < tolerance

    def weight_errors(self, layer: Linear, x: Tensor, dy: Tensor) -> Tensor:
        """The relative error of each row of dW to that of what is stored of x."""
        stand_in = copy.deepcopy(layer.rules.wide).pack(x).values()
        layer.zero_grad()
        layer(x).backward(dy)
        want = dy.double().T @ stand_in.double()
        return (layer.weight.grad - want).norm(dim=1) / want.norm(dim=1)

    @pytest.mark.parametrize("spread", ["rows", "columns", "both"])
    def test_no_row_or_column_of_dy_coarsens_another(self, spread, device):
        torch.manual_seed(0)
        layer = self.layer("8-bit", True, True, device)
        x, dy = torch.randn(400, 33, device=device), torch.randn(400, 17, device=device)
        sizes = torch.logspace(0, -3, 400, device=device), torch.logspace(0, -4, 17, device=device)
        dy *= sizes[0][:, None] if spread != "columns" else 1
        dy *= sizes[1] if spread != "rows" else 1
        assert self.weight_errors(layer, x, dy).max() < 0.05
        # On a card dy is rounded along its rows first, where columns a hundredth as large are lost:
        # more than .4 of the rows of dW would be off by more than .3, so GEMMs run in float32.
        allowed = spread == "rows" or device.type == "cpu"
        assert layer.int8_cost.state_dict() == {"measured": True, "allowed": allowed}

    @pytest.mark.parametrize("precision", PRECISIONS, ids=str)
    def test_gemms_of_columns_with_few_large_entries_run_in_the_dtype_of_dy(
        self, precision, device, caplog
    ):
        torch.manual_seed(0)
        layer = self.layer("8-bit", True, True, device)
        x = torch.randn(400, 33, device=device).square()  # the middle of its range is far from 0
        dy = torch.full((400, 17), 2e-4, device=device)  # p of all classes but the target
        dy[:, 16] = -1
        dy[range(16), range(16)] = -0.1
        assert not self.weight_errors(layer, x, 0 * dy).isfinite().any()
        assert not layer.int8_cost.measured  # where the gradient is zero
        with caplog.at_level("INFO", "razorctl"):
            for _ in range(2):  # the step that measures, and the next
                assert self.weight_errors(layer, x, dy).max() < 1e-4
        (record,) = caplog.records
        assert "runs its gradient GEMMs in float32" in record.getMessage()
        _, dx, *_ = run(layer, x, layer, precision)
        layer.detach()
        assert torch.equal(dx, run(layer, x, layer, precision)[1])

    @pytest.mark.parametrize("weight", [False, True])
    def test_the_product_with_what_a_norm_and_a_function_make_of_codes(self, weight, device):
        rule, x = Quantized(8), torch.randn(40, 33, device=device)
        of_y = rule.pack(x).of_affine(*torch.randn(2, 33, device=device), x.dtype)
        packed = of_y.of_function("silu")
        dy = torch.randn(40, 17, device=device)
        got = Gemms(dy, weight, False).product(packed)
        assert distance(got, dy.T @ packed.values()) < (2e-2 if weight else 1e-5)

    def test_rows_with_small_gradients_are_not_lost(self, device):
        """A class token gets a gradient a hundred times that of the others, which are many."""
        layer, x = self.layer("8-bit", True, False, device), torch.randn(2000, 33, device=device)
        dy = 0.01 * torch.randn(2000, 17, device=device)
        dy[::200] *= 100
        layer(x).backward(dy)
        others = torch.arange(2000, device=device) % 200 != 0
        got = layer.weight.grad - dy[~others].T @ x[~others]
        assert distance(got, dy[others].T @ x[others]) < 0.3  # .9 if they are

    def test_columns_with_the_mean_kept(self, device):
        """The mean's part does not go through int8 at all."""
        layer = self.layer("columns-norm", True, False, device)
        layer.rules = both(Centered(layer.rules.wide))
        x = torch.full((40, 33), 3.7, device=device)
        # One draw for all devices: the error is .008, but above .02 for 5 % of draws.
        x[:, 5] += torch.randn(40, generator=torch.Generator().manual_seed(0)).to(device)
        _, _, dw, db = run(layer, x, layer, None)
        others = [i for i in range(33) if i != 5]
        torch.testing.assert_close(dw[:, others], db[:, None] * x[:1, others], rtol=1e-4, atol=1e-4)
        dy = torch.linspace(-1, 1, 40 * 17, device=device).view(40, 17)
        assert distance(dw[:, 5], dy.T @ x[:, 5]) < 0.02

    def test_small_layers_keep_their_precision(self, monkeypatch):
        monkeypatch.setattr(Linear, "SMALLEST", 40 * 33 * 17 + 1)
        layer, x = self.layer("dense", True, True), torch.randn(40, 33)
        _, dx, dw, _ = run(layer, x, layer, None)
        layer.__class__ = nn.Linear
        want = run(layer, x, layer, None)
        assert torch.equal(dx, want[1])
        torch.testing.assert_close(dw, want[2])

    def test_switched_by_the_recipe(self):
        for weight, inputs in ((None, None), (True, None), (False, True)):
            net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
            recipe = Recipe("razor", int8_weight_grad=weight, int8_input_grad=inputs)
            sparsify(net, recipe)
            assert net[0].int8_weight_grad == (weight is not False)
            assert net[0].int8_input_grad == (inputs is not False)
            assert type(net[1]) is nn.Linear  # the classifier


@pytest.mark.parametrize("fused", [True, False])
def test_a_nan_in_the_gradient_reaches_that_of_the_input_of_a_frozen_layer(fused, monkeypatch):
    monkeypatch.setattr(Linear, "SMALLEST", 0)
    monkeypatch.setattr("razorctl.ops.kernels._wanted", fused)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).train()
    sparsify(net, Recipe(ratio=0.5))
    net[1].requires_grad_(False)
    y = net[0](torch.randn(8, 64)).detach().requires_grad_()
    cotangent = torch.ones(8, 64)
    cotangent[3, 7] = torch.nan
    net[1](y).backward(cotangent)
    assert y.grad.isnan().all(1).nonzero().tolist() == [[3]]
    assert y.grad[:3].isfinite().all()
