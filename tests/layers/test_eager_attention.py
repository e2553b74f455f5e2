"""Attention of transformers that is eager, or has a trainable mask: what runs is what is stock."""

import copy

import pytest
import torch
import transformers as hf
from torch import nn

from razorctl import Recipe, restore, saved_bytes, sparsify
from razorctl.layers.base import RazorLayer
from tests import models, zoo

SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "d_model": 32}
SERIES |= {"num_time_features": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
IMAGES = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2], "num_heads": [2]}
BUILDERS = {
    "bert": models.bert,
    "llama": zoo.llama,
    "gemma2": zoo.MODELS["gemma2"][0],  # caps its scores
    "series": lambda: hf.TimeSeriesTransformerModel(hf.TimeSeriesTransformerConfig(**SERIES)),
    "swin": lambda: hf.SwinForImageClassification(hf.SwinConfig(**IMAGES, window_size=4)),
}
EAGER = ("bert", "llama", "gemma2", "series")


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = BUILDERS[name]().train()
    if name in EAGER:  # that of the last is eager anyway
        model.set_attn_implementation("eager")
    return model


def inputs(name: str) -> dict:
    torch.manual_seed(1)
    if name == "series":
        past, future = ((torch.randn(2, n), torch.randn(2, n, 1)) for n in (10, 4))
        known = {"past_values": past[0], "past_time_features": past[1]}
        known |= {"past_observed_mask": torch.ones(2, 10)}
        return known | {"future_values": future[0], "future_time_features": future[1]}
    if name == "swin":
        return {"pixel_values": torch.randn(2, 3, 32, 32)}
    ids = torch.randint(3, 50, (2, 12))
    return {"input_ids": ids, "attention_mask": (ids > 3).long()}


def run(model: nn.Module, name: str, autocast: bool = False, **options: bool) -> tuple:
    """The output, the probabilities of attention, the gradients of their squares, and at these."""
    model.zero_grad()
    torch.manual_seed(2)  # of dropout
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(**inputs(name), **options)
    attentions = [t for key in out if "attentions" in key for t in out[key] or ()]
    for t in attentions:
        t.retain_grad()
    sum(t.float().square().sum() for t in (out[0], *attentions)).backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    at = torch.cat([t.grad.flatten() for t in attentions]) if attentions else None
    return out[0].detach(), [t.detach() for t in attentions], torch.cat(grads), at


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", BUILDERS)
def test_the_forward_pass_is_stock(name, autocast):
    model = build(name)
    want = run(model, name, autocast)
    sparsify(model, Recipe("int8"))
    assert any(
        "Attention" in type(m).__name__ for m in model.modules() if isinstance(m, RazorLayer)
    )
    got = run(model, name, autocast)
    assert torch.equal(got[0], want[0])
    assert torch.cosine_similarity(got[2], want[2], 0) > 0.999


@pytest.mark.parametrize("name", EAGER)
def test_probabilities_are_returned_with_the_gradient_of_all_that_follows(name):
    model = build(name)
    want = run(model, name, output_attentions=True)
    sparsify(model, Recipe("int8"))
    got = run(model, name, output_attentions=True)
    assert len(got[1]) == len(want[1]) > 1
    assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))
    assert got[2].shape == want[2].shape
    assert torch.cosine_similarity(got[2], want[2], 0) > 0.999
    assert torch.cosine_similarity(got[3], want[3], 0) > 0.999


@pytest.mark.parametrize("attention", ["stored", "flash"])
def test_backends_that_return_no_probabilities_are_stock_where_they_are_asked_for(attention):
    model = build("bert")
    model.config.output_attentions = True
    want = run(model, "bert")
    sparsify(model, Recipe("backrazor", attention=attention))
    assert len(run(model, "bert")[1]) == len(want[1]) == 2
    assert all(torch.equal(a, b) for a, b in zip(run(model, "bert")[1], want[1], strict=True))


def test_eager_attention_keeps_no_probabilities():
    model = build("bert")
    batch = inputs("bert") | {"output_attentions": False}
    full = saved_bytes(model, batch)
    sparsify(model, Recipe("int8"))
    with_dropout = saved_bytes(model, batch)
    assert with_dropout < 0.5 * full


def test_an_eager_function_that_reads_parameters_is_stock():
    model = build("bert")
    layer = model.bert.encoder.layer[0].attention.self
    layer.scaling = nn.Parameter(torch.tensor(layer.scaling))
    want = run(model, "bert")
    sparsify(model, Recipe("int8"))
    got = run(model, "bert")
    assert layer.scaling.grad
    assert got[2].shape == want[2].shape


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_config_is_left_alone(implementation):
    config = models.bert().config
    config._attn_implementation = implementation
    first, second = (hf.BertForSequenceClassification(config).train() for _ in "ab")
    before = copy.deepcopy(config)
    sparsify(first, Recipe("int8"))
    sparsify(second, Recipe("int8"))  # shares the config
    assert config._attn_implementation == implementation
    run(first, "bert")
    restore(first)
    run(second, "bert")
    restore(second)
    assert config.to_dict() == before.to_dict()
