"""The contract of a model, for every model in the registry."""

import hashlib
import json

import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

from razorctl.errors import UsageError
from razorctl.families import find, models
from razorctl.families.timm import VIT_MICRO, VIT_MICRO_WEIGHTS
from razorctl.job import Job


@pytest.mark.parametrize("name", models())
def test_feeds_and_trains(name):
    entry = find(name)
    assert entry.name == name
    assert entry.summary
    model = entry.build(7).train()
    images = [Image.new(mode, (8, 11), 100) for mode in ("L", "RGB", "RGBA", "P")]
    rows = entry.transform(model)({"image": images, "label": [0, 1, 2, 6]})
    assert rows["labels"] == [0, 1, 2, 6]
    logits = entry.logits(model, torch.stack(rows["inputs"]))
    assert logits.shape == (4, 7)
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", models())
def test_defaults_are_settings_of_a_job(name):
    Job(name, "digits", **models()[name].defaults)


def test_unknown_model_gets_the_nearest():
    with pytest.raises(UsageError, match="unknown model 'vit-mikro'; did you mean 'vit-micro'"):
        find("vit-mikro")


def test_vit_micro_weights_are_those_that_the_record_describes():
    record = json.loads((VIT_MICRO_WEIGHTS.parent / "pretraining.json").read_text())
    weights = VIT_MICRO_WEIGHTS.read_bytes()
    assert record["sha256"] == hashlib.sha256(weights).hexdigest()
    assert len(weights) <= 3_000_000
    assert record["test_accuracy"] > 0.85
    assert {k: record["architecture"][k] for k in VIT_MICRO} == VIT_MICRO


def test_vit_micro_is_a_stock_timm_model_with_a_fresh_classifier():
    model = find("vit-micro").build(10)
    assert type(model) is VisionTransformer
    torch.manual_seed(1)
    other = find("vit-micro").build(10)
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b) != (name == "head.weight"), name
    assert model.blocks[0].attn.qkv.weight.std() > 0.02  # not timm's initialisation
