"""The contract of a rule, for every rule in the registry."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from razorctl.ops.functions import FUNCTIONS
from razorctl.ops.packing import BITS, packed_bytes
from razorctl.rules import registry
from razorctl.rules.allocation import Names
from razorctl.rules.base import Rule, survivors
from razorctl.rules.packed import Packed
from razorctl.rules.prune import Centered, Columns
from razorctl.rules.quantized import Quantized
from razorctl.rules.registry import RULES, RuleSettings

# One of the rules that share their code and stand for their input.
NAMES = (
    *("dense", "half", "topk", "8-bit", "3-bit", "2-bit", "4-bit-stochastic", "columns-norm"),
    *("columns-bandit", "topk, centered", "columns-bandit, centered"),
)
SHAPES = [(1, 1), (7, 13), (0, 8)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_rule = pytest.mark.parametrize("name", NAMES)


def base(name: str) -> type[Rule]:
    """The class of a rule, without a mean correction."""
    return RULES[name.partition(", ")[0]].rule


scaled_or_not = pytest.mark.parametrize(
    ("name", "unbiased"),
    [(name, False) for name in NAMES] + [(name, True) for name in NAMES if base(name).draws],
)
FEW_BITS = [name for name in NAMES if base(name) is Quantized]
# Few-bit rules round at most half a step, stochastic ones at most a step.
STEPS = {name: 1.0 if "stochastic" in name else 0.6 for name in FEW_BITS}


def weight_grad(dy, packed):
    """dW of a linear layer, in the dtype of dy."""

    def product(x):
        return dy.T @ (x.values() if isinstance(x, Packed) else x).to(dy.dtype)

    return packed.spread(*map(product, packed.operands()))


def build(name: str, columns: int, density: float, unbiased: bool) -> Rule:
    name, _, centered = name.partition(", ")
    rule = RULES[name].build(RuleSettings(columns, density, unbiased))
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
    if not unbiased:  # closer than nothing is
        assert (back - x).double().norm() <= 1.001 * x.double().norm() + 1e-2
    if rule.prunes and not unbiased and not isinstance(rule, Centered):
        assert ((back == x) | (back == 0)).all()


@pytest.mark.parametrize("name", FEW_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_few_bits_round_to_the_nearest_code_or_the_next(name, shape, dtype, device):
    x = torch.randn(shape, device=device).to(dtype)
    rule = build(name, shape[1], 0.3, False)
    back, largest = rule.pack(x).values(), 2**rule.bits - 1
    assert (back - x).double().norm() <= 2 * x.double().norm() / largest + 1e-2
    if dtype == torch.float32:  # codes span up to 8
        assert torch.allclose(back, x, rtol=2**-12, atol=STEPS[name] * 8 / largest)


@pytest.mark.parametrize("name", [name for name in NAMES if base(name).prunes])
@pytest.mark.parametrize("shape", SHAPES)
def test_density_one_prunes_nothing(name, shape, device):
    x = torch.randn(shape, device=device)
    back = build(name, shape[1], 1.0, True).pack(x).values()
    torch.testing.assert_close(back, x, rtol=1e-6, atol=1e-6)


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
def test_constant_and_huge_inputs_become_no_larger(name, value, device):
    x = torch.full((6, 20), value, device=device)
    back = build(name, 20, 0.3, False).pack(x).values()
    assert not back.isnan().any()
    assert (back * x.sign() >= 0).all()
    assert (back.abs() <= x.abs() * (1 + 2**-11)).all()


@pytest.mark.parametrize("value", [0.0, 1.0, -2e38])
def test_constant_and_huge_inputs_are_kept_as_they_are(value, device):
    x = torch.full((6, 20), value, device=device)

    def back(name: str) -> Tensor:
        return build(name, 20, 0.3, False).pack(x).values()

    assert torch.equal(back("half"), x.clamp(-65504, 65504))
    for name in (name for name in NAMES if "centered" in name):
        assert torch.equal(back(name), x)
    for name in FEW_BITS:
        tolerance = 2**-11 if "stochastic" in name else 2**-14
        torch.testing.assert_close(back(name), x, rtol=tolerance, atol=0)


def drawn_bytes(x: Tensor, kept: float) -> int:
    # Indices of 8 bytes and probabilities of 4 beside the columns.
    return round(kept * x.shape[1]) * (len(x) * x.element_size() + 12)


def few_bits(bits: int) -> Callable[[Tensor, float], int]:
    # Codes, and a zero point and a scale of 2 bytes for each column.
    return lambda x, kept: packed_bytes(*x.shape, bits) + x.shape[1] * 4


# The bytes that a rule keeps of an activation, where it prunes all but a share of it.
BYTES = {
    "dense": lambda x, kept: x.nbytes,
    "half": lambda x, kept: 2 * x.numel(),
    "topk": lambda x, kept: round(kept * x.numel()) * x.element_size() + (x.numel() + 7) // 8,
    "columns-norm": lambda x, kept: round(kept * x.shape[1]) * (len(x) * x.element_size() + 8),
    **dict.fromkeys(("columns-uniform", "columns-bandit", "columns-proportional"), drawn_bytes),
    **{f"{bits}-bit": few_bits(bits) for bits in BITS},
    **{f"{bits}-bit-stochastic": few_bits(bits) for bits in BITS},
}


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize(("rows", "columns", "kept"), [(64, 128, 0.1), (50, 77, 0.37)])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_exact_bytes(name, rows, columns, kept, dtype):
    x = torch.randn(rows, columns).to(dtype)
    assert nbytes(build(name, columns, kept, True).pack(x)) == BYTES[name](x, kept)


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
        rule = RULES["columns-bandit"].build(RuleSettings(20, 0.25, unbiased))
        for _ in range(10):
            weight_grad(dy, rule.pack(x))
        ps.append(rule.sampler.p)
    assert torch.equal(*ps)
    assert ps[0].max() > ps[0].min()


@pytest.mark.parametrize("name", [*RULES, "topk, centered", "columns-bandit, centered"])
def test_what_the_registry_says_of_a_rule_without_building_it(name):
    rule, entry = build(name, 20, 0.3, False), RULES[name.partition(", ")[0]]
    within = rule.rule if isinstance(rule, Centered) else rule
    assert type(within) is entry.rule
    for nature in ("prunes", "elementwise", "draws", "tiled"):
        assert getattr(within, nature) == getattr(entry.rule, nature)
    assert rule.draws == (rule.sampler is not None)
    packed = rule.pack(torch.randn(5, 20))
    assert rule.elementwise == packed.elementwise
    assert rule.prunes == within.prunes


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
        narrow = packed.of_affine(weight.bfloat16(), bias, torch.bfloat16).copy.scale
        assert torch.equal(narrow, packed.copy.scale.float() * weight.bfloat16())
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
    rules = registry.build(Names("8-bit", "4-bit"), RuleSettings(7, 0.5))
    assert [rules.of(d).bits for d in DTYPES] == [8, 4, 4]
    assert len(registry.build(Names("topk", "topk"), RuleSettings(7, 0.5)).each) == 1
