"""The int8 forward pass of linear layers: near the exact one, which all the rest still goes by."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from razorctl import Recipe, restore, sparsify
from razorctl.layers.kinds.linear import Linear
from razorctl.rules.registry import RULES, RuleSettings
from tests.layers.test_linear import PRECISIONS, distance, int8, oracle, razor, run
from tests.layers.test_memo import Split

SHAPES = [(40, 33), (3, 7, 33), (33,)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_precision = pytest.mark.parametrize("precision", PRECISIONS, ids=str)


@pytest.fixture(autouse=True)
def whatever_the_size(monkeypatch):
    monkeypatch.setattr(Linear, "SMALLEST", 0)


def layer(bias: bool = True, device: torch.device | str = "cpu") -> Linear:
    found = razor(RULES["dense"].build(RuleSettings(33, 0.3)), bias, device)
    found.int8_forward = True
    return found


def split() -> nn.Module:
    model = Split()
    sparsify(model, Recipe("razor", 0.5, int8_forward=True))
    return model


@every_shape
@every_precision
@pytest.mark.parametrize("bias", [False, True])
def test_an_output_is_as_far_from_the_exact_one_as_the_scales_allow(shape, precision, bias, device):
    module, x = layer(bias, device), torch.randn(shape, device=device)
    with torch.autocast(device.type, precision, enabled=precision is not None):
        y = module(x)
    dtype = precision or torch.float32
    assert (y.shape, y.dtype) == ((*shape[:-1], 17), dtype)
    x, w = x.to(dtype).double().reshape(-1, 33), module.weight.detach().double()
    b = module.bias.detach().double() if bias else torch.zeros(17, device=device).double()
    # x and W are wrong by half a step at most, a 127th of the largest of a row.
    dx, dw = (t.abs().amax(1) / 254 for t in (x, w))
    bound = dx[:, None] * w.abs().sum(1) + x.abs().sum(1)[:, None] * dw + 33 * dx[:, None] * dw
    exact, error = x @ w.T + b, y.detach().double().view(-1, 17)
    error = (error - exact).abs()
    rounding = torch.finfo(dtype).eps * (exact.abs() + bound)
    assert (error <= bound + rounding).all()
    copies = int8(x, 1) @ int8(w, 1).T + b
    tight = 1e-5 if precision is None else 1e-2
    assert distance(y.view(-1, 17), copies) < tight
    assert distance(exact, copies) > 1e-3


@every_shape
@every_precision
def test_gradients_are_those_of_the_exact_forward_pass(shape, precision, device):
    module, x = layer(device=device), torch.randn(shape, device=device)

    def exact(x: Tensor) -> Tensor:
        parts = (t.to(precision or t.dtype) for t in (x, module.weight, module.bias))
        with torch.autocast(device.type, enabled=False):
            return oracle(*parts, module.rules.wide)

    got, want = (run(forward, x, module, precision) for forward in (module, exact))
    for a, b in zip(got[1:], want[1:], strict=True):
        assert distance(a, b) < (1e-5 if precision is None else 2e-2)
    assert not torch.equal(got[0], want[0])


@every_precision
def test_without_int8_products_and_kernels_it_is_the_same(precision, monkeypatch):
    """Single-precision products stand in for those of codes, and autocast must not round them."""
    module, x = layer(), torch.randn(40, 33)
    with torch.autocast("cpu", precision, enabled=precision is not None):
        want = module(x)
        monkeypatch.setattr("razorctl.ops.gemm.has_vnni", lambda: False)
        monkeypatch.setattr("razorctl.ops.kernels._wanted", False)
        torch.testing.assert_close(module(x), want, rtol=0 if precision else 1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["x", "weight"])
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_not_finite_is_not_lost(where, value, bias, device):
    module, x = layer(bias, device), torch.randn(5, 33, device=device)
    with torch.no_grad():
        (x if where == "x" else module.weight)[2, 3] = value
    bad = ~module(x).isfinite()
    assert (bad[2] if where == "x" else bad[:, 2]).all()


def test_degenerate_inputs(device):
    module = layer(device=device)
    for x in (torch.zeros(4, 33), torch.empty(0, 33), torch.empty(2, 0, 33)):
        y = module(x.to(device))
        assert torch.equal(y, module.bias.expand_as(y))


@every_precision
def test_where_nothing_is_saved_it_is_the_stock_one(precision):
    model, x = nn.Sequential(nn.Linear(33, 17), nn.Linear(17, 3)), torch.randn(40, 33)
    state = {name: t.clone() for name, t in model.state_dict().items()}

    def out() -> Tensor:
        with torch.autocast("cpu", precision, enabled=precision is not None):
            y: Tensor = model(x)
            return y

    want = out()
    sparsify(model, Recipe("razor", 0.5, int8_forward=True))
    assert not torch.equal(out(), want)
    with torch.no_grad():
        assert torch.equal(out(), want)
    model.eval()
    assert torch.equal(out(), want)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    restore(model.train())
    assert torch.equal(out(), want)
    assert "int8_forward" not in vars(model[0])


def test_small_layers_keep_their_precision(monkeypatch):
    monkeypatch.setattr(Linear, "SMALLEST", 40 * 33 * 17)
    model = nn.Sequential(nn.Linear(33, 17), nn.Linear(17, 17), nn.Linear(17, 3))
    x = torch.randn(40, 33)
    want = model[0](x), model[1](model[0](x))
    sparsify(model, Recipe("razor", 0.5, int8_forward=True))
    assert not torch.equal(model[0](x), want[0])
    assert torch.equal(model[0](x[1:]), want[0][1:])
    assert torch.equal(model[1](want[0].detach()), want[1])


def test_a_compiled_program_makes_equal_copies_once():
    counts: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        calls = [node for node in graph.graph.nodes if "int8_rows" in str(node.target)]
        counts.append(len(calls))
        return graph.forward

    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=lambda *args: make_boxed_func(count(*args)),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compiler.reset()
    torch.compile(split(), fullgraph=True, backend=backend)(torch.randn(40, 33))
    assert counts[0] == 1 + 3  # of x, and of each weight
