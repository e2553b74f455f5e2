"""Gated MLPs against autograd through what the rule unpacks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from razorctl import Recipe, sparsify
from razorctl.layers.kinds.gated_mlp import GatedMLP
from razorctl.memory.saved import traced_bytes
from razorctl.rules.base import Rule
from razorctl.rules.quantized import Quantized
from razorctl.rules.registry import RULES, RuleSettings
from tests.cases import razor

ROWS, WIDTH, INNER = 40, 12, 20
FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def mlp(function: str = "silu") -> LlamaMLP:
    return LlamaMLP(
        LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=INNER,
            num_attention_heads=3,
            hidden_act=function,
            mlp_bias=True,
        )
    ).train()


def oracle(model: nn.Module, x: Tensor, rule: Rule, dy: Tensor, function: str) -> list[Tensor]:
    """The gradients of x and of the parameters, from what a rule restores of gate and up."""
    layers = model.gate_proj, model.up_proj, model.down_proj
    with torch.no_grad():
        parts = [layer(x) for layer in layers[:2]]
        near, gate = [rule.pack(part).values().requires_grad_() for part in parts], None
    restored = FUNCTIONS[function](near[0]) * near[1]
    dw = dy.T @ restored
    gate, up = torch.autograd.grad(restored, near, dy @ layers[2].weight.data)
    dx = gate @ layers[0].weight.data + up @ layers[1].weight.data
    grads = [g for part in (gate, up) for g in (part.T @ x, part.sum(0))]
    return [t.detach() for t in (dx, *grads, dw, dy.sum(0))]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("rule", ["8-bit", "3-bit", "half", "dense"])
def test_gradients_equal_the_oracle(function, rule):
    model, built = mlp(function), RULES[rule].build(RuleSettings(INNER, 0.5))
    x, dy = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    want = oracle(model, x, built, dy, function)
    y = model(x)
    holder = nn.Sequential(model, nn.Linear(WIDTH, 2))  # whose last linear layer stays stock
    sparsify(holder, Recipe("int8", int8_weight_grad=False, int8_input_grad=False))
    model.rules = type(model.rules)(built, built)
    for layer in (model.gate_proj, model.up_proj, model.down_proj):
        dense = RULES["dense"].build(RuleSettings(WIDTH, 0.5))
        layer.rules = type(model.rules)(dense, dense)
    a = x.clone().requires_grad_()
    got = model(a)
    assert torch.equal(got, y)
    got.backward(dy)
    if not built.tiled:  # then the last layer has packed its own input
        want[5] = dy.T @ (FUNCTIONS[function](model.gate_proj(x)) * model.up_proj(x)).detach()
    # As autograd has the parameters: gate, up, down, each with its bias.
    torch.testing.assert_close([a.grad, *(p.grad for p in model.parameters())], want)


@pytest.mark.parametrize("joined", [False, True])
def test_exact_bytes(joined):
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": 3}
    model = Phi3MLP(Phi3Config(**sizes)) if joined else mlp()
    holder = nn.Sequential(nn.LayerNorm(WIDTH), model, nn.ReLU(), nn.Linear(WIDTH, 2))
    sparsify(holder, Recipe("int8"))
    # x_hat with 1 / std, gate and up: 8 bits, and 4 bytes of scale for each column, 8 for y of the
    # norm; the signs of the ReLU and its output, dense.
    want = ROWS * (WIDTH + 2 * INNER) + 4 * (2 * WIDTH + 2 * INNER) + 4 * ROWS
    want += ROWS * WIDTH // 8 + 4 * ROWS * WIDTH
    assert traced_bytes(holder, torch.randn(ROWS, WIDTH)) == want


def test_a_copy_is_shared_once_with_the_layer_that_it_feeds():
    holder = nn.Sequential(mlp(), nn.Linear(WIDTH, 2))
    sparsify(holder, Recipe("int8"))
    packed, pack = [], Quantized.pack
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Quantized, "pack", lambda rule, x: packed.append(x.shape) or pack(rule, x))
        holder(torch.randn(ROWS, WIDTH, requires_grad=True)).sum().backward()
    assert packed == [(ROWS, WIDTH), (ROWS, INNER), (ROWS, INNER)]


def test_a_function_without_a_derivative_from_a_copy_stays_stock():
    model = nn.Sequential(mlp("tanh"))
    sparsify(model, Recipe("int8"))
    assert not isinstance(model[0], GatedMLP)


def test_a_frozen_gate():
    model = razor(mlp(), RULES["8-bit"].build(RuleSettings(INNER, 0.5)))
    model.gate_proj.requires_grad_(False)
    model(torch.randn(ROWS, WIDTH)).square().sum().backward()
    assert model.up_proj.weight.grad.any()
    assert model.gate_proj.weight.grad is None
