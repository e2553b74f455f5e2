"""`attend` against its oracles: autograd through the attention of what the rules restore."""

import weakref
from itertools import permutations, product

import pytest
import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor

from razorctl.layers.base import RazorLayer
from razorctl.rules.prune import Centered, TopK
from razorctl.rules.registry import RULES, RuleSettings
from tests.cases import razor
from tests.kept import saved
from tests.layers.test_every_layer import TOLERANCE, assert_close

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 13, 7
RULE_NAMES = ["dense", "half", "topk", "topk, centered"]
BACKENDS = ["stored", "sparse-flash"]
MASKS = ["none", "bool", "float", "causal"]
every_rule = pytest.mark.parametrize("rule", RULE_NAMES)


def layer(rule: str, backend: str, density: float = 0.4) -> RazorLayer:
    name, _, centered = rule.partition(", ")
    built = RULES[name].build(RuleSettings(WIDTH, density))
    module = Attention(HEADS * WIDTH, HEADS).train()
    return razor(module, Centered(built) if centered else built, backend)


def inputs(device, dtype=torch.float32) -> list[Tensor]:
    shape = (BATCH, HEADS, TOKENS, WIDTH)
    return [(2 * torch.randn(shape, device=device)).to(dtype).requires_grad_() for _ in "qkv"]


def options(mask: str, device) -> dict:
    padding = torch.ones(BATCH, 1, 1, TOKENS, dtype=torch.bool, device=device)
    padding[1, ..., 9:] = False
    if mask == "causal":
        return {"is_causal": True}
    if mask == "bool":
        return {"attn_mask": padding}
    if mask == "float":
        bias = torch.randn(1, HEADS, TOKENS, TOKENS, device=device)
        return {"attn_mask": bias.masked_fill(~padding, -1e30)}
    return {}


def stand_ins(attention: RazorLayer, tensors: list[Tensor]) -> list[Tensor]:
    """Of q, k, v and maybe the probabilities, whose columns have no mean taken out."""
    unpacked, rule = [], attention.rules.wide
    for i, t in enumerate(tensors):
        of_t = rule.rule if i == 3 and isinstance(rule, Centered) else rule
        heads = t.detach().flatten(0, -3)
        unpacked.append(of_t.pack(heads).values().view(t.shape))
    return unpacked


def with_gradient(value: Tensor, source: Tensor) -> Tensor:
    """`value`, with the gradient of `source`."""
    return value + (source - source.detach())


def probabilities(q: Tensor, k: Tensor, settings: dict) -> Tensor:
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    mask = settings.get("attn_mask")
    if settings.get("is_causal"):
        mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return scores.softmax(-1)


STORED = [*product(RULE_NAMES, MASKS), ("dense", "dropout"), ("topk", "dropout")]


@pytest.mark.parametrize(("rule", "mask"), STORED)
def test_stored_gradients_equal_the_oracle(rule, mask, device):
    attention, drops = layer(rule, "stored"), mask == "dropout"
    q, k, v = inputs(device)
    settings = options(mask, device)
    dense = probabilities(q, k, settings).detach()
    torch.manual_seed(5)
    dropped = F.dropout(dense, 0.3) if drops else dense
    scaled = q.detach() * WIDTH**-0.5  # what is kept of q
    signed = torch.where(dropped > 0, dense, -dense) if drops else dense
    qs, ks, vs, ps = stand_ins(attention, [scaled, k, v, signed])
    on = (ps > 0) / 0.7 if drops else 1
    ps = ps.abs() / ps.abs().sum(-1, keepdim=True)
    # Both products are bilinear, and softmax at log P has the Jacobian of P.
    scores = (q * WIDTH**-0.5) @ ks.transpose(-2, -1) + qs @ k.transpose(-2, -1)
    p = with_gradient(ps.log(), scores).softmax(-1)
    out = (p * on) @ vs + (ps * on) @ v
    cotangent = torch.randn(out.shape, device=device)
    want = torch.autograd.grad(out, (q, k, v), cotangent)
    torch.manual_seed(5)
    y = attention.attend(q, k, v, dropout_p=0.3 * drops, **settings)
    assert_close([y], [dropped @ v], 1e-5)
    got = list(torch.autograd.grad(y, (q, k, v), cotangent))
    # The last bit of a probability may round its half the other way.
    assert_close(got, list(want), 2e-4 if rule == "half" else 2e-5)


@every_rule
@pytest.mark.parametrize("mask", MASKS)
def test_sparse_flash_gradients_equal_the_oracle(rule, mask, device):
    attention = layer(rule, "sparse-flash")
    tensors = inputs(device)
    settings = options(mask, device)
    pruned = [
        with_gradient(*pair) for pair in zip(stand_ins(attention, tensors), tensors, strict=True)
    ]
    out = F.scaled_dot_product_attention(*pruned, **settings)
    cotangent = torch.randn(out.shape, device=device)
    want = torch.autograd.grad(out, tensors, cotangent)
    y = attention.attend(*tensors, **settings)
    assert torch.equal(y, F.scaled_dot_product_attention(*tensors, **settings))
    assert_close(list(torch.autograd.grad(y, tensors, cotangent)), list(want), 1e-5)


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_views_of_one_output_may_be_in_any_order(order):
    """The gradient of q, k and v goes to the part that each is a view of."""
    leaf = torch.randn(BATCH, TOKENS, 3 * HEADS * WIDTH, requires_grad=True)
    grads = []
    for attend in (layer("8-bit", "sparse-flash").attend, F.scaled_dot_product_attention):
        parts = (leaf * 1).view(BATCH, TOKENS, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
        y = attend(*(parts[number] for number in order))
        grads += torch.autograd.grad(y.pow(2).sum(), leaf)
    assert_close(*([grad] for grad in grads), 0.05)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_everything_kept_equals_stock_in_low_precision(backend, mask, dtype, device):
    tensors = inputs(device, dtype)
    settings = options(mask, device)
    if mask == "float":
        settings["attn_mask"] = settings["attn_mask"].clamp(min=-1e4).to(dtype)
    results = []
    for attend in (layer("dense", backend).attend, F.scaled_dot_product_attention):
        y = attend(*tensors, **settings)
        results.append([y, *torch.autograd.grad(y, tensors, torch.ones_like(y))])
    assert_close(*results, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_which_nothing_takes_part_is_finite(backend, device):
    tensors = inputs(device)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=device)
    mask[2] = False
    y = layer("topk", backend).attend(*tensors, attn_mask=mask)
    for t in (y, *torch.autograd.grad(y.square().sum(), tensors)):
        assert t.isfinite().all()


def test_sparse_flash_replays_dropout_and_leaves_the_generator_alone(device):
    attention = layer("dense", "sparse-flash")
    tensors = inputs(device)
    cotangent = torch.randn(tensors[0].shape, device=device)
    results, states = [], []
    for attend in (attention.attend, F.scaled_dot_product_attention):
        torch.manual_seed(5)
        y = attend(*tensors, dropout_p=0.3)
        torch.rand(7, device=device)  # what a later layer draws
        results.append([y, *torch.autograd.grad(y, tensors, cotangent)])
        states.append(torch.rand(3, device=device))
    assert_close(*results, 1e-5)
    assert torch.equal(*states)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_that_is_learned_gets_its_gradient(backend, device):
    tensors = inputs(device)
    results = []
    for attend in (layer("dense", backend).attend, F.scaled_dot_product_attention):
        torch.manual_seed(0)
        bias = torch.randn(1, HEADS, TOKENS, TOKENS, device=device, requires_grad=True)
        y = attend(*tensors, bias)
        y.square().sum().backward()
        results.append([y.detach(), bias.grad])
    assert_close(*results, 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fewer_heads_of_k_and_v(backend, device):
    q, k, v = inputs(device)
    k, v = (t[:, :1].detach().requires_grad_() for t in (k, v))
    results = []
    for attend in (layer("dense", backend).attend, F.scaled_dot_product_attention):
        y = attend(q, k, v, enable_gqa=True)
        results.append([y, *torch.autograd.grad(y.square().sum(), (q, k, v))])
    assert_close(*results, 2e-5)


def test_a_row_of_which_nothing_is_left_gives_no_gradient_and_no_nan():
    attention = layer("topk", "stored", density=0.02)
    q, k, v = inputs("cpu")
    q.data[0, 0, 0] = 0  # all its probabilities are 1 / 13, smaller than the others' largest
    for grad in torch.autograd.grad(attention.attend(q, k, v).sum(), (q, k, v)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_parts_get_no_gradient(backend):
    attention = layer("topk", backend)
    q, k, v = inputs("cpu")
    k.requires_grad_(False)
    attention.attend(q, k, v).sum().backward()
    assert k.grad is None
    assert q.grad.any()
    frozen = [t.detach() for t in (q, k, v)]
    attention.rules = object()  # whoever asks it fails
    assert not attention.attend(*frozen).requires_grad


@pytest.mark.parametrize(("mask", "backend"), [("float", "aot_eager"), ("causal", "eager")])
def test_compiled_dropout_drops_the_same_in_the_backward_pass(mask, backend):
    attention, chosen = layer("half", "sparse-flash"), options(mask, "cpu")
    bias = chosen.get("attn_mask", torch.empty(0)).requires_grad_()
    q, k, v = inputs("cpu")
    tensors = [q, *(t[:, :1].detach().requires_grad_() for t in (k, v)), bias]

    def step(attend, repeats):
        y = attend(*tensors[:3], dropout_p=0.3, repeats=repeats, **chosen)
        return [y, *torch.autograd.grad(y.square().sum(), tensors, allow_unused=True)]

    torch.compiler.reset()
    torch.manual_seed(1)
    got = step(torch.compile(attention.attend, backend=backend, fullgraph=True), HEADS)
    torch.manual_seed(1)
    torch.manual_seed(int(torch.randint(2**62, (1,))))  # as a compiled program draws
    for a, b in zip(got, step(attention.attend, HEADS), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_kept_bytes(backend):
    attention = layer("topk", backend, 0.5)
    n, p = BATCH * HEADS * TOKENS * WIDTH, BATCH * HEADS * TOKENS * TOKENS

    def kept(count: int) -> int:
        return round(0.5 * count) * 4 + (count + 7) // 8

    size = sum(t.nbytes for t in saved(attention.attend, *inputs("cpu")))
    assert size == 3 * kept(n) + (kept(p) if backend == "stored" else 0)


def test_stored_attention_packs_a_copy_at_a_time(monkeypatch):
    """q, k, v lie apart in memory, and each is copied before it is packed."""
    copies, pack = [], TopK.pack

    def watched(self, x):
        assert not any(copy() is not None for copy in copies)
        copies.append(weakref.ref(x))
        return pack(self, x)

    monkeypatch.setattr(TopK, "pack", watched)
    leaf = torch.randn(BATCH, TOKENS, 3 * HEADS * WIDTH, requires_grad=True)
    parts = leaf.view(BATCH, TOKENS, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
    layer("topk", "stored").attend(*parts)
    assert len(copies) == 4


def test_dropout_is_replayed_under_a_rule_that_draws():
    """The output is linear in v, so v and its gradient make the output again if the mask is it."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, BATCH, HEADS, TOKENS, WIDTH).unbind(0)
    v.requires_grad_()
    y = layer("8-bit-stochastic", "sparse-flash").attend(q, k, v, dropout_p=0.5)
    (dv,) = torch.autograd.grad(y.sum(), v)
    torch.testing.assert_close((dv * v).sum(), y.sum(), rtol=0.02, atol=0)
