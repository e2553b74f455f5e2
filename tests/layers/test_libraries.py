"""Attention of the libraries that is switched, refused, unknown or not one."""

import pytest
import torch
from torch import nn
from transformers.models.bert.modeling_bert import BertSelfAttention

from razorctl import Recipe, restore, sparsify
from razorctl.errors import UsageError
from razorctl.layers.attention.stored import Attention
from razorctl.layers.base import RazorLayer
from tests.zoo import small, step


def test_a_softmax_that_is_taken_in_single_precision_is_stock():
    model, inputs = small("hf vit")
    model = model.double()  # in which a lower one shows
    model.set_attn_implementation("eager")
    images = inputs["pixel_values"].double()
    want = model(images).logits
    sparsify(model, Recipe("backrazor", attention="stored"))
    assert torch.equal(model(images).logits, want)


def test_what_transformers_attention_cannot_do_is_refused_before_any_change():
    model, _ = small("bert")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UsageError, match=r"bert.encoder.layer.0.*flex_attention.*'sdpa'"):
        sparsify(model, Recipe("backrazor"))
    assert not any(isinstance(m, RazorLayer) for m in model.modules())


def test_attention_of_a_user_beside_the_known_runs_stock():
    class Mine(BertSelfAttention):
        pass

    model, inputs = small("bert")
    model.bert.encoder.layer[0].attention.self.__class__ = Mine
    want = step(model, inputs)
    sparsify(model, Recipe("prebackrazor++"))
    mine = model.bert.encoder.layer[0].attention.self
    assert isinstance(mine, Mine)
    assert not isinstance(mine, Attention)  # its dropout may be known
    got = step(model, inputs)
    assert torch.equal(got[0], want[0])
    assert got[2].isfinite().all()


def test_timm_attention_can_be_switched_while_sparsified():
    model, _ = small("vit")
    sparsify(model, Recipe("backrazor"))
    model.blocks[0].attn.fused_attn = False
    restore(model)
    assert model.blocks[0].attn.fused_attn is False
    assert model.blocks[1].attn.fused_attn is True


def test_checkpointing_that_a_model_lacks_is_refused_before_any_change():
    class Lacks(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, _ = small("vit")

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
        "stock, so stored in full: 1 (Tanh)",
        "unknown attention, so stock and stored in full: 0 (OddAttention)",
    ]
    model(torch.randn(2, 5, 8)).sum().backward()
    assert all(p.grad.any() for p in model.parameters())
