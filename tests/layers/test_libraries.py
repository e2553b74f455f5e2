"""Whole models of the libraries: what is swapped, forward passes, gradients, and the way back."""

import copy
import pickle

import pytest
import timm
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.models.bert.modeling_bert import BertSelfAttention

from razorctl import Recipe, restore, sparsify
from razorctl.errors import UsageError
from razorctl.layers.attention.stored import Attention
from razorctl.layers.base import RazorLayer

SMALL = {"img_size": 32, "num_classes": 5, "embed_dim": 24, "depth": 2, "num_heads": 3}
SIZES = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "vocab_size": 50,
    "num_labels": 5,
}
DISTIL = {"dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40, "vocab_size": 50}
IMAGES = ViTConfig(**SIZES, image_size=32, patch_size=8)
BUILDERS = {
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", **SMALL, patch_size=8),
    "deit": lambda: timm.create_model("deit_tiny_distilled_patch16_224", **SMALL, patch_size=8),
    "dinov2": lambda: timm.create_model("vit_small_patch14_reg4_dinov2", **SMALL, patch_size=8),
    "normed": lambda: timm.create_model(
        "vit_tiny_patch16_224", **SMALL, patch_size=8, qk_norm=True
    ),
    "hf vit": lambda: ViTForImageClassification(IMAGES),
    "bert": lambda: BertForSequenceClassification(BertConfig(**SIZES)),
    "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**SIZES)),
    "distilbert": lambda: DistilBertForSequenceClassification(
        DistilBertConfig(**DISTIL, num_labels=5)
    ),
}
HF = ("hf vit", "bert", "roberta", "distilbert")
every_model = pytest.mark.parametrize("name", BUILDERS)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return BUILDERS[name]().train()


def inputs(name: str) -> dict:
    torch.manual_seed(1)
    if name in ("bert", "roberta", "distilbert"):
        ids = torch.randint(5, 50, (3, 11))
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        return {"input_ids": ids, "attention_mask": mask}
    return {"pixel_values" if name in HF else "x": torch.randn(3, 3, 32, 32)}


def run(model: nn.Module, name: str) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    model.zero_grad()
    torch.manual_seed(2)
    output = model(**inputs(name))
    y = getattr(output, "logits", output)
    y.square().sum().backward()
    return y.detach(), [p.grad for p in model.parameters()]


@every_model
@pytest.mark.parametrize("attention", ["stored", "flash", "sparse-flash"])
def test_forward_is_stock_and_what_is_swapped_is_everything(name, attention):
    model = build(name)
    exact = Recipe("full", attention="stored" if attention == "stored" else "flash")
    sparsify(model, exact)
    want, stock_grads = run(model, name)
    restore(model)
    names = sparsify(model, Recipe("backrazor", attention=attention))
    assert sum(isinstance(m, Attention) for m in model.modules()) == 2
    # Of the leaves, only those that save nothing, or next to nothing, are stock.
    left = {type(m).__name__ for m in model.modules() if not isinstance(m, RazorLayer)}
    assert not {"Linear", "LayerNorm", "GELU", "GELUActivation", "Conv2d", "LayerScale"} & left
    assert len(names) > 10
    got, grads = run(model, name)
    assert torch.equal(got, want)
    a, b = (
        torch.cat([g.flatten() for g in part if g is not None]) for part in (grads, stock_grads)
    )
    assert torch.cosine_similarity(a, b, 0) > 0.4


@every_model
@pytest.mark.parametrize("method", ["prebackrazor", "prebackrazor++"])
def test_copies_pickles_and_the_way_back(name, method):
    model = build(name)
    before, names = run(model, name), list(model.state_dict())
    types = [type(m) for m in model.modules()]
    sparsify(model, Recipe(method))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        assert list(twin.state_dict()) == names
        run(twin, name)
        restore(twin)
        assert [type(m) for m in twin.modules()] == types
        assert torch.equal(run(twin, name)[0], before[0])
        assert not any({"rule", "memo", "backend"} & set(vars(m)) for m in twin.modules())


@every_model
def test_evaluation_is_stock(name):
    model = build(name).eval()
    want = run(model, name)[0]
    for method in ("backrazor", "prebackrazor++"):
        sparsify(model, Recipe(method))
        assert torch.equal(run(model, name)[0], want)
        restore(model)


@every_model
def test_checkpointing_is_exact_and_undone(name):
    model = build(name)
    want = run(model, name)
    assert sparsify(model, Recipe("checkpoint")) == ("",)
    with pytest.raises(UsageError, match="restore"):
        sparsify(model, Recipe("full"))
    got = run(model, name)
    assert torch.equal(got[0], want[0])
    for a, b in zip(got[1], want[1], strict=True):
        assert a is b is None or torch.allclose(a, b, rtol=1e-4, atol=1e-6)
    restore(model)
    flags = ("gradient_checkpointing", "grad_checkpointing")
    assert not any(getattr(m, flag, False) for m in model.modules() for flag in flags)


def test_a_softmax_that_is_taken_in_single_precision_is_stock():
    model = build("hf vit").double()  # in which a lower one shows
    model.set_attn_implementation("eager")
    images = inputs("hf vit")["pixel_values"].double()
    want = model(images).logits
    sparsify(model, Recipe("backrazor", attention="stored"))
    assert torch.equal(model(images).logits, want)


def test_what_transformers_attention_cannot_do_is_refused_before_any_change():
    model = build("bert")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UsageError, match=r"bert.encoder.layer.0.*flex_attention.*'sdpa'"):
        sparsify(model, Recipe("backrazor"))
    assert not any(isinstance(m, RazorLayer) for m in model.modules())


def test_attention_of_a_user_beside_the_known_runs_stock():
    class Mine(BertSelfAttention):
        pass

    model = build("bert")
    model.bert.encoder.layer[0].attention.self.__class__ = Mine
    want, _ = run(model, "bert")
    sparsify(model, Recipe("prebackrazor++"))
    mine = model.bert.encoder.layer[0].attention.self
    assert isinstance(mine, Mine)
    assert not isinstance(mine, Attention)  # its dropout may be known
    got, grads = run(model, "bert")
    assert torch.equal(got, want)
    assert all(grad is None or grad.isfinite().all() for grad in grads)


def test_timm_attention_can_be_switched_while_sparsified():
    model = build("vit")
    sparsify(model, Recipe("backrazor"))
    model.blocks[0].attn.fused_attn = False
    restore(model)
    assert model.blocks[0].attn.fused_attn is False
    assert model.blocks[1].attn.fused_attn is True


def test_checkpointing_that_a_model_lacks_is_refused_before_any_change():
    class Lacks(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = timm.create_model("vit_tiny_patch16_224", **SMALL, patch_size=8)

        def set_grad_checkpointing(self, enable=True):
            assert not enable, "not supported"

    model = Lacks()
    with pytest.raises(UsageError, match="checkpointing"):
        sparsify(model, Recipe("checkpoint", attention="stored"))
    assert not any(isinstance(m, RazorLayer) for m in model.modules())


class PartAttention(nn.Module):
    """A part that a decoder may have, as in segmentation_models_pytorch."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x)


class ChannelAttention(nn.Module):
    """A gate of channels."""

    def __init__(self):
        super().__init__()
        self.squeeze = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        return x * self.squeeze(x.mean((2, 3), keepdim=True)).sigmoid()


@pytest.mark.parametrize("part", [nn.Identity, ChannelAttention])
def test_attention_that_makes_no_product_is_not_unknown(part, caplog):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), PartAttention(part()), nn.ReLU(), nn.Conv2d(8, 2, 1))
    sparsify(model, Recipe("razor", 0.5))
    assert not caplog.messages


def test_unknown_attention_stays_stock_and_is_named(caplog):
    class OddAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    model = nn.Sequential(OddAttention(), nn.Tanh(), nn.Linear(8, 2))
    with caplog.at_level("INFO", "razorctl"):
        assert sparsify(model, Recipe("backrazor")) == ("0.qkv", "2")
    assert caplog.messages == [
        "stock, so kept in full: 1 (Tanh)",
        "unknown attention, so stock and kept in full: 0 (OddAttention)",
    ]
    model(torch.randn(2, 5, 8)).sum().backward()
    assert all(p.grad.any() for p in model.parameters())
