"""Activations that are made again in the backward pass: their gradients, bytes and lifetime."""

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from razorctl import Recipe, methods, restore, saved_bytes, sparsify
from razorctl.errors import UsageError
from razorctl.memory.saved import traced_bytes_by_module
from razorctl.methods import EXACT, Method
from razorctl.rules.dense import Dense
from razorctl.rules.derived import Cell
from razorctl.rules.quantized import Quantized
from tests.models import vit
from tests.zoo import MODELS, TEXTS, adapted, every_model, llama, t5

KINDS = ("linear", "conv", "norm", "channel-norm", "scale", "attention", "activation")


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """A recipe of a rule for every kind; of others for some."""

    def build(rule: str, **others: str) -> Recipe:
        fields = vars(methods.METHODS["half"]) | {"name": "trial"}
        fields["rules"] = dict.fromkeys(KINDS, rule) | others | EXACT
        monkeypatch.setitem(methods.METHODS, "trial", Method(**fields))
        return Recipe("trial")

    return build


def gradients(model: nn.Module, inputs: Any, passes: int = 1) -> torch.Tensor:
    torch.manual_seed(1)
    model.zero_grad()
    y = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    loss = y.square().sum() if isinstance(y, torch.Tensor) else y.loss
    for left in reversed(range(passes)):
        model.zero_grad()
        loss.backward(retain_graph=left > 0)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@every_model
def test_gradient_of_exact_copies_is_exact(name, recipe, monkeypatch):
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model = build().train()
    stock = gradients(model, inputs)
    dense = recipe("dense")
    sparsify(model, dense)
    kept = saved_bytes(model, inputs)
    restore(model)
    monkeypatch.setattr(Dense, "again", True)
    sparsify(model, dense)
    torch.testing.assert_close(gradients(model, inputs), stock, rtol=1e-4, atol=1e-5)
    assert saved_bytes(model, inputs) < 0.7 * kept


def cells() -> list[Cell]:
    return [thing for thing in gc.get_objects() if isinstance(thing, Cell)]


@pytest.fixture
def subject(recipe) -> tuple[nn.Module, torch.Tensor]:
    """A ViT that makes again what it can, and its input."""
    torch.manual_seed(0)
    model = vit().train()
    sparsify(model, recipe("8-bit-again"))
    return model, MODELS["vit"][1]


def test_values_are_dropped_after_their_last_reader(subject):
    model, images = subject
    gc.collect()
    before = set(map(id, cells()))
    loss = model(images).square().sum()
    made = [cell for cell in cells() if id(cell) not in before]
    loss.backward()
    assert sum(cell.readers > 1 for cell in made) >= 6
    assert not any(cell.value is not None for cell in made)


def test_a_second_backward_pass_makes_them_again(subject):
    model, images = subject
    once = gradients(model, images)
    torch.testing.assert_close(gradients(model, images, passes=2), once, rtol=0, atol=0)


def test_a_pass_that_reads_some_leaves_nothing_false(subject):
    """A value of which a pass reads a part serves the next pass, or is made again."""
    model, images = subject
    expected = gradients(model, images)
    torch.manual_seed(1)
    loss = model(images).square().sum()
    model.zero_grad()
    torch.autograd.grad(loss, [model.blocks[0].norm1.weight], retain_graph=True)
    loss.backward()
    got = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("layer", ["attn.qkv", "attn.proj", "mlp.fc1"])
def test_a_weight_that_changed_is_an_error(subject, layer):
    model, images = subject
    loss = model(images).square().sum()
    with torch.no_grad():
        model.blocks[1].get_submodule(layer).weight.mul_(1.0)
    with pytest.raises(UsageError, match=rf"of blocks\.1\.{layer} \(Linear\) was changed in place"):
        loss.backward()


def test_a_weight_that_is_freed_is_an_error(subject):
    """FSDP frees it so, where it shards a part of a block by itself."""
    model, images = subject
    loss = model(images).square().sum()
    model.blocks[1].attn.qkv.weight.untyped_storage().resize_(0)
    with pytest.raises(UsageError, match=r"weight of blocks\.1\.attn\.qkv is sharded apart"):
        loss.backward()


def test_a_mask_that_changed_is_an_error(subject):
    block, mask = subject[0].blocks[1], torch.zeros(17, 17)
    y = block(torch.randn(2, 17, 24, requires_grad=True), attn_mask=mask)
    mask[0, 1] = -1.0
    with pytest.raises(UsageError, match=r"of blocks\.1\.attn \(Attention\) was changed in place"):
        y.sum().backward()


def test_positions_that_changed_are_an_error(recipe):
    model = llama().train()
    sparsify(model, recipe("8-bit-again"))
    cos, sin = model.model.rotary_emb(torch.randn(1, 8, 24), torch.arange(8)[None])
    x = torch.randn(1, 8, 24, requires_grad=True)
    y = model.model.layers[1](x, position_embeddings=(cos, sin))
    sin.mul_(1.0)
    with pytest.raises(UsageError, match="was changed in place"):
        y.sum().backward()


def test_rotary_positions_that_need_heads(recipe, monkeypatch):
    """Positions of PE-Audio reshape k by a size that no heads leave open."""
    from transformers.models.llama import modeling_llama

    stock = modeling_llama.apply_rotary_pos_emb

    def rotated(q, k, *args, **kwargs):
        return stock(q, k.reshape(*k.shape[:-1], -1, 2).flatten(-2), *args, **kwargs)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated)
    model = llama().train()
    exact = gradients(model, TEXTS)
    monkeypatch.setattr(Dense, "again", True)
    sparsify(model, recipe("dense"))
    torch.testing.assert_close(gradients(model, TEXTS), exact, rtol=1e-4, atol=1e-6)


class Uses(nn.Module):
    """A block in a use of its parts that no library has."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.block, self.norm, self.use = vit().blocks[0], nn.LayerNorm(24), use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block, use = self.block, self.use
        if use == "twice":  # each module, in one pass
            return block(block(x))
        if use == "norm in place":
            return x + block.mlp(block.norm2(x).mul_(2.0))
        if use == "norm of a norm":
            return x + block.mlp(self.norm(block.norm2(x)))
        with torch.no_grad():
            y = block.attn(block.norm1(x))
        return block.mlp(block.norm2(x + y))


@pytest.mark.parametrize("use", ["twice", "norm in place", "norm of a norm", "no grad in part"])
@pytest.mark.parametrize("rule", ["dense", "8-bit-again"])
def test_uses_of_modules(use, rule, recipe, monkeypatch):
    torch.manual_seed(0)
    model, x = Uses(use).train(), torch.randn(3, 5, 24)
    x.requires_grad_()
    stock = gradients(model, x)
    monkeypatch.setattr(Dense, "again", True)
    sparsify(model, recipe(rule))
    got = gradients(model, x)
    if rule == "dense":
        torch.testing.assert_close(got, stock, rtol=1e-4, atol=1e-4)
    assert torch.cosine_similarity(got, stock, dim=0) > 0.999


@pytest.mark.parametrize("build", [llama, t5])
def test_a_cache_of_keys_and_values_changes_nothing(recipe, build):
    """Decoders of transformers fill one in training too, unless they are told not to."""
    torch.manual_seed(0)
    model = build().train()
    sparsify(model, recipe("8-bit-again"))
    without = {**TEXTS, "use_cache": False}
    assert saved_bytes(model, TEXTS) <= saved_bytes(model, without)
    expected, apart = gradients(model, without), 1e-6 if build is t5 else 0.0  # order of sums
    torch.testing.assert_close(gradients(model, TEXTS), expected, rtol=0, atol=apart)
    for layer in [] if build is t5 else model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    got = gradients(model, TEXTS)
    assert torch.cosine_similarity(got, expected, dim=0) > 0.999


def test_dropout_of_adapters_is_replayed(recipe):
    torch.manual_seed(0)
    model = adapted(llama, 0.3).train()
    stock, kept = gradients(model, TEXTS), list[int]()
    for rule in ("8-bit", "8-bit-again"):
        sparsify(model, recipe(rule))
        kept.append(saved_bytes(model, TEXTS))
        close = torch.cosine_similarity(gradients(model, TEXTS), stock, dim=0)
        restore(model)
        assert close > 0.999
    assert kept[1] < 0.7 * kept[0]


def test_weights_are_updated_after_their_last_use(subject):
    """An optimizer in the backward pass changes each weight once its gradient is accumulated."""
    model, images = subject
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    gradients(twin, images)
    optimizer.step()
    for parameter in model.parameters():
        single = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, single=single: single.step())
    gradients(model, images)
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


# The modules that read the output of attention.
OUTPUTS = (
    "attn.proj",
    ".o_proj",
    ".out_proj",
    ".out_lin",
    "attention.output.dense",
    ".attn_out_proj",
)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gemma2"])
def test_attention_keeps_neither_q_k_v_nor_its_output(name, recipe, monkeypatch):
    """gemma2 caps its scores, which fused attention cannot."""
    build, inputs = MODELS[name]
    model, packed = build().train(), list[torch.Size]()
    sparsify(model, recipe("8-bit-again"))
    pack = Quantized.pack

    def noting(self, x):
        packed.append(x.shape)
        return pack(self, x)

    monkeypatch.setattr(Quantized, "pack", noting)
    kept = traced_bytes_by_module(model, inputs)
    assert not [shape for shape in packed if len(shape) > 2]
    assert not [place for place in kept if place.endswith(OUTPUTS)]


@pytest.mark.parametrize("name", ["scaled", "bert", "gpt2", "beit", "gemma2", "parallel", "eva"])
def test_few_bits_in_bf16(name, recipe):
    """Two copies a block, then one, keep fewer bytes at a close gradient."""
    build, inputs = MODELS[name]
    torch.manual_seed(0)
    model = build().train()
    stock, kept = gradients(model, inputs), list[int]()
    two = dict.fromkeys(("linear", "attention", "activation", "scale"), "8-bit-again")
    for others in ({}, two, {**two, "norm": "8-bit-again"}):
        sparsify(model, recipe("8-bit", **others))
        kept.append(saved_bytes(model, inputs, autocast=torch.bfloat16))
        with torch.autocast("cpu", torch.bfloat16):
            close = torch.cosine_similarity(gradients(model, inputs), stock, dim=0)
        restore(model)
        assert close > 0.995
    assert kept[1] < (0.9 if name == "gemma2" else 0.8) * kept[0]  # which has four norms a block
    assert kept[2] < kept[1] or name == "parallel"  # which has one norm a block
