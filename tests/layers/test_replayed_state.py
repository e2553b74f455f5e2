"""Layers that run again in the backward pass: PEFT's adapters of every kind but plain LoRA."""

import copy

import peft
import pytest
import torch
from torch import nn
from torch.nn.functional import cosine_similarity
from transformers import LlamaConfig, LlamaModel

from razorctl import Recipe, restore, sparsify
from razorctl.errors import UsageError
from razorctl.layers.libraries.peft import Adapter
from razorctl.layers.recompute.kept_inputs import CodeOutput
from razorctl.memory.saved import traced_bytes

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 50,
}
# What each adapter is told, and what part of it no linear layer computes.
ADAPTERS = {
    "LoraConfig": {"use_dora": True, "lora_dropout": 0.2},  # norms of weights, and dropout
    "IA3Config": {"feedforward_modules": ["down_proj"]},  # scales of inputs and of outputs
    "AdaLoraConfig": {"total_step": 100},  # products with parameters
    "LoHaConfig": {},  # products of whole weights
    "OFTConfig": {"r": 0, "oft_block_size": 16},  # rotations
    "RandLoraConfig": {},  # bases that all layers share
}
IDS = torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(0))


def adapted(kind: str) -> nn.Module:
    torch.manual_seed(0)
    targets = {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}
    config = getattr(peft, kind)(**targets, **ADAPTERS[kind])
    model = peft.get_peft_model(LlamaModel(LlamaConfig(**SIZES)), config)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.detach().abs().max() <= 1e-4:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def step(model: nn.Module, precision: torch.dtype | None) -> tuple[torch.Tensor, dict]:
    model.zero_grad()
    torch.manual_seed(1)
    with torch.autocast("cpu", precision, enabled=precision is not None):
        y = model(input_ids=IDS).last_hidden_state
    torch.manual_seed(2)  # the second run draws what the first drew
    y.backward(torch.randn_like(y))
    return y.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def cosine(a: dict, b: dict) -> float:
    return cosine_similarity(*(torch.cat([g.flatten() for g in t.values()]) for t in (a, b)), dim=0)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_keep_little_and_restore(kind):
    model = adapted(kind)
    types, full = [type(module) for module in model.modules()], traced_bytes(model, IDS)
    for precision, least in ((None, 0.999), (torch.bfloat16, 0.99)):
        y, exact = step(model, precision)
        sparsify(model, Recipe(ratio=0.9))
        again, got = step(model, precision)
        assert torch.equal(again, y)
        assert got.keys() == exact.keys()
        assert cosine(got, exact) > least
        if precision is None:
            assert traced_bytes(model, IDS) < 0.12 * full
        restore(model)
    assert [type(module) for module in model.modules()] == types


def test_the_gradient_is_that_of_the_stock_layer_at_the_values_of_the_copy():
    model = adapted("LoraConfig")
    sparsify(model, Recipe(ratio=0.9))
    layer = model.get_submodule("base_model.model.layers.0.mlp.up_proj")
    assert isinstance(layer, Adapter)
    x, dy = torch.randn(4, 16, 32, requires_grad=True), torch.randn(4, 16, 64)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    values = layer.copy_rows(x, x).values().view(x.shape).requires_grad_()
    torch.manual_seed(1)
    wanted = torch.autograd.grad(layer.stock(values), [values, *parameters], dy)
    torch.manual_seed(1)
    y = layer(x)
    (offer,) = layer.memo.derived((y,), model)
    assert isinstance(offer, CodeOutput)
    for got, want in zip(torch.autograd.grad(y, [x, *parameters], dy), wanted, strict=True):
        assert torch.equal(got, want)
    assert not torch.equal(values, x)


def test_what_is_not_one_input_runs_as_stock():
    model = adapted("LoHaConfig")
    twin = copy.deepcopy(model)
    sparsify(model, Recipe(ratio=0.9))
    for part in (model, twin):
        part.disable_adapter_layers()
    assert torch.equal(model(input_ids=IDS)[0], twin(input_ids=IDS)[0])


def test_a_parameter_that_changed_is_an_error():
    model = adapted("IA3Config")
    sparsify(model, Recipe(ratio=0.9))
    y = model(input_ids=IDS).last_hidden_state
    with torch.no_grad():
        model.get_submodule("base_model.model.layers.1.mlp.up_proj").ia3_l["default"].mul_(1.0)
    with pytest.raises(UsageError, match=r"layers\.1\.mlp\.up_proj \(Linear\) was changed in"):
        y.sum().backward()
