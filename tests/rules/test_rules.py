"""The contract of a rule, for every rule in the registry."""

import copy
import pickle

import pytest
import torch

from razorctl.errors import UsageError
from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.packing import BITS, packed_bytes
from razorctl.rules import registry
from razorctl.rules.allocation import Names
from razorctl.rules.base import Rule, Rules, survivors
from razorctl.rules.packed import Packed
from razorctl.rules.prune import Centered, Columns, TopK
from razorctl.rules.quantized import Quantized
from razorctl.rules.registry import RULES, Wanted

# One of the rules that share their code and stand for their input.
NAMES = (
    *("dense", "half", "topk", "8-bit", "3-bit", "2-bit", "4-bit-stochastic", "columns-norm"),
    *("columns-bandit", "topk, centered", "columns-bandit, centered"),
)
SHAPES = [(1, 1), (7, 13), (0, 8)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_rule = pytest.mark.parametrize("name", NAMES)
scaled_or_not = pytest.mark.parametrize(
    ("name", "unbiased"),
    [*((name, False) for name in NAMES), *((name, True) for name in NAMES if "bandit" in name)],
)


def weight_grad(dy, packed):
    """dW of a linear layer, in the dtype of dy."""

    def product(x):
        return dy.T @ (x.values() if isinstance(x, Packed) else x).to(dy.dtype)

    return packed.spread(product(packed.operand()), product)


def build(name: str, columns: int, density: float, unbiased: bool) -> Rule:
    name, _, centered = name.partition(", ")
    rule = RULES[name](Wanted(columns, density, unbiased))
    return Centered(rule) if centered else rule


def nbytes(packed: Packed) -> int:
    tensors = [t for t in packed.tensors if t is not None]
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in tensors)
    return sum(t.numel() * t.element_size() for t in tensors)


@scaled_or_not
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_round_trip(name, shape, dtype, unbiased, device):
    x = torch.randn(shape, device=device).to(dtype)
    rule = build(name, shape[1], 0.3, unbiased)
    back = rule.pack(x).values()
    assert back.shape == x.shape
    assert back.dtype == x.dtype
    assert back.isfinite().all()
    if name == "half":
        assert torch.equal(back, x.half().to(dtype) if dtype == torch.float32 else x)
    elif "bit" in name:
        assert (back - x).double().norm() <= 2 * x.double().norm() / (2 ** int(name[0]) - 1) + 1e-2
    elif "centered" not in name and not (unbiased and name.startswith("columns")):
        assert ((back == x) | (back == 0)).all()


@every_rule
@pytest.mark.parametrize("shape", SHAPES)
def test_density_one_restores_everything(name, shape, device):
    x = torch.randn(shape, device=device)
    rule = build(name, shape[1], 1.0, True)
    tolerance = {"rtol": 2**-11, "atol": 1e-7} if name == "half" else {"rtol": 1e-6, "atol": 1e-6}
    if "bit" in name:  # half a step of what spans up to 8, or by chance a whole one
        step = 8 / (2 ** int(name[0]) - 1)
        tolerance = {"rtol": 2**-12, "atol": step if "stochastic" in name else 0.6 * step}
    assert torch.allclose(rule.pack(x).values(), x, **tolerance)


@every_rule
@pytest.mark.parametrize("dtype", DTYPES)
def test_kept_bytes_depend_on_shape_alone(name, dtype, device):
    rule = build(name, 64, 0.25, False)
    inputs = [torch.randn(40, 64), torch.zeros(40, 64), torch.full((40, 64), 1e4)]
    inputs.append(torch.randn(40, 64) * torch.arange(64))
    sizes = {nbytes(rule.pack(x.to(device, dtype))) for x in inputs}
    assert len(sizes) == 1


@scaled_or_not
@pytest.mark.parametrize("dtype", DTYPES)
def test_weight_grad_is_the_product_with_what_is_restored(name, dtype, unbiased, device):
    x = torch.randn(33, 96, device=device).to(dtype)
    dy = torch.randn(33, 17, device=device).to(dtype)
    rule = build(name, 96, 0.2, unbiased)
    packed = rule.pack(x)
    want = dy.double().T @ packed.values().double()
    got = weight_grad(dy, packed)
    assert got.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    error = (got.double() - want).norm() / want.norm()
    assert error < tolerance


@every_rule
@pytest.mark.parametrize("value", [0.0, 1.0, -2e38, torch.inf])
def test_constant_and_huge_inputs_are_kept_as_they_are(name, value, device):
    x = torch.full((6, 20), value, device=device)
    rule = build(name, 20, 0.3, False)
    back = rule.pack(x).values()
    assert not back.isnan().any()
    if name == "half":
        assert torch.equal(back, x.clamp(-65504, 65504))
    elif (name.endswith("centered") or "bit" in name) and x.isfinite().all():
        tolerance = 2**-11 if "stochastic" in name else 2**-14 if "bit" in name else 0
        torch.testing.assert_close(back, x, rtol=tolerance, atol=0)
    elif "bit" in name:
        assert back.isfinite().all()
    else:
        assert ((back == x) | (back == 0)).all()


@pytest.mark.parametrize("name", ["topk", "4-bit-stochastic", "columns-bandit, centered"])
def test_copies_and_pickles(name):
    rule = build(name, 20, 0.3, False)
    x = torch.randn(5, 20)
    for twin in (copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):
        first = copy.deepcopy(rule)
        torch.manual_seed(1)
        a = first.pack(x).values()
        torch.manual_seed(1)
        assert torch.equal(a, twin.pack(x).values())
        again = twin.pack(x).values()
        assert torch.equal(a, again) == (name == "topk")  # which alone draws nothing


@pytest.mark.parametrize(("rows", "columns", "density"), [(64, 128, 0.1), (50, 77, 0.37)])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_exact_bytes(rows, columns, density, dtype):
    x = torch.randn(rows, columns).to(dtype)
    n, width = x.numel(), x.element_size()
    assert nbytes(TopK(density).pack(x)) == round(density * n) * width + (n + 7) // 8
    s = round(density * columns)
    assert nbytes(Columns(density).pack(x)) == s * (rows * width + 8)
    for name in ("columns-uniform", "columns-bandit", "columns-proportional"):
        # indices of 8 bytes and probabilities of 4 beside the columns
        assert nbytes(build(name, columns, density, True).pack(x)) == s * (rows * width + 12)
    for bits in BITS:
        # codes, and an offset and a step in single precision for each column
        assert nbytes(Quantized(bits).pack(x)) == packed_bytes(rows, columns, bits) + columns * 4
        assert packed_bytes(rows, columns, bits) == pytest.approx(n * bits / 8, abs=8 * bits)


@pytest.mark.parametrize(("total", "density", "kept"), [(10, 0.1, 1), (10, 0.01, 1), (3, 1.0, 3)])
def test_at_least_one_survives(total, density, kept):
    assert survivors(total, density) == kept


def test_columns_of_largest_norm():
    x = torch.randn(50, 6) * torch.tensor([1.0, 5.0, 0.1, 9.0, 2.0, 0.3])
    assert Columns(0.5).pack(x).index.tolist() == [1, 3, 4]


def test_unbiased_columns_have_the_exact_gradient_as_mean(monkeypatch):
    x, dy = torch.randn(16, 20), torch.randn(16, 5)
    rule = build("columns-bandit", 20, 0.25, True)
    for _ in range(50):  # away from uniform probabilities
        weight_grad(dy, rule.pack(x))
    p = rule.sampler.p.clone()
    assert p.max() > 1.2 * p.min()
    monkeypatch.setattr(rule.sampler, "update", lambda *args: None)  # one p for all draws
    exact = dy.T @ x
    total, draws = torch.zeros_like(exact), 4000
    for _ in range(draws):
        total += weight_grad(dy, rule.pack(x))
    # Each entry is exact / p with probability p: five standard errors of its mean.
    spread = exact.abs() * ((1 - p) / p / draws).sqrt()
    assert ((total / draws - exact).abs() < 5 * spread + 1e-5).all()


def test_the_bandit_learns_from_the_unscaled_gradient():
    x, dy = torch.randn(16, 20), torch.randn(16, 5)
    ps = []
    for unbiased in (False, True):
        torch.manual_seed(1)
        rule = RULES["columns-bandit"](Wanted(20, 0.25, unbiased))
        for _ in range(10):
            weight_grad(dy, rule.pack(x))
        ps.append(rule.sampler.p)
    assert torch.equal(*ps)
    assert ps[0].max() > ps[0].min()


@pytest.mark.parametrize("name", [*RULES, "topk, centered", "columns-norm, centered"])
def test_what_the_registry_says_of_itself(name):
    rule = build(name, 20, 0.3, False)
    assert rule.prunes == (name not in ("dense", "half") and "bit" not in name)
    assert rule.elementwise == (name in ("dense", "half", "topk") or "bit" in name)


@pytest.mark.parametrize("name", ["topk, centered", "columns-bandit, centered"])
def test_the_mean_correction_keeps_means_and_their_gradient_exactly(name):
    x = torch.randn(40, 20) + torch.arange(20)
    dy = torch.randn(40, 7)
    rule = build(name, 20, 0.3, True)
    assert torch.equal(rule.pack(x).mean, x.double().mean(0, keepdim=True).float())
    # Rows that are all equal to the mean have nothing but the exact part.
    constant = x.mean(0).expand(40, 20)
    got = weight_grad(dy, rule.pack(constant))
    assert torch.allclose(got, dy.T @ constant, rtol=1e-4, atol=1e-4)


def test_the_mean_correction_comes_closer():
    x, dy = torch.randn(500, 30) + 2 * torch.randn(30), torch.randn(500, 7)
    exact = dy.T @ x
    for name in ("topk", "columns-norm", "columns-uniform"):
        errors = []
        for rule in (build(name, 30, 0.2, False), build(f"{name}, centered", 30, 0.2, False)):
            grad = weight_grad(dy, rule.pack(x))
            errors.append((grad - exact).norm())
        assert errors[1] < errors[0]


def test_half_costs_two_bytes_an_element():
    for dtype in DTYPES:
        assert nbytes(build("half", 9, 0.1, False).pack(torch.randn(5, 9).to(dtype))) == 90


def test_heads_have_steps_of_their_own():
    x = torch.randn(3, 50, 4) * torch.tensor([1.0, 100.0, 1e4]).view(3, 1, 1)
    rule = Quantized(4)
    back = rule.pack(x).values()
    for got, want in zip(back, x, strict=True):
        assert (got - want).norm() < 0.15 * want.norm()


@pytest.mark.parametrize("function", [None, "silu"])
def test_blocks_and_what_is_shared_of_them(function, device):
    """Blocks of rows have scales of their own, and so has an affine or other function of them."""
    x = torch.randn(8, 5, device=device) * torch.tensor([1.0, 100.0], device=device).repeat(
        4, 1
    ).T.reshape(8, 1)
    dy, rule = torch.randn(8, 3, device=device), Quantized(8, rows=4)
    packed = rule.pack(x)
    assert packed.copy.scale.shape == (2, 5)
    if function is None:
        weight, bias = torch.randn(2, 5, device=device)
        shared, want = packed.of_affine(weight, bias, torch.bfloat16), x * weight + bias
        assert shared.dtype == torch.bfloat16
    else:
        shared, want = packed.of_function(function), FUNCTIONS[function].forward(x)
    back = shared.values().float()
    assert (back - want).norm() < 0.01 * want.norm()
    assert (back[:4] - want[:4]).norm() < 0.01 * want[:4].norm()
    got = weight_grad(dy, shared)
    torch.testing.assert_close(got, dy.T @ back)
    dx = packed.function_grad("silu", dy[:, :1].expand(8, 5))
    torch.testing.assert_close(dx, FUNCTIONS["silu"].backward(dy[:, :1], packed.values()))


def test_the_rule_for_a_width():
    one = build("3-bit", 7, 0.5, False)
    rules = Rules(one, None)
    assert rules.of(torch.float32) is one
    with pytest.raises(UsageError, match=r"16 bits; the largest that can is 0\.9"):
        rules.of(torch.bfloat16)
    other = registry.build(Names("8-bit", "4-bit"), Wanted(7, 0.5))
    assert [other.of(d).bits for d in DTYPES] == [8, 4, 4]
    assert registry.build(Names("topk", "topk"), Wanted(7, 0.5)).narrow is not None
    assert registry.build(Names("8-bit", None), Wanted(7, 0.5)).narrow is None
