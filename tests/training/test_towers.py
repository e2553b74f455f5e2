"""The gradient of razor on models of images and texts that have learned the names of digits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

from razorctl import Recipe, data
from razorctl.config.job import Job
from razorctl.memory.job_forward import JobForward
from razorctl.memory.saved import traced_bytes
from razorctl.models.transformers.pretrained_files import PretrainedFiles
from razorctl.models.transformers.towers import LARGEST, TwoTowers
from razorctl.step import autocast
from razorctl.surgery.byte_budget import sparsify_within

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 256}
SIZES |= {"num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": 14, "max_position_embeddings": 8}
TEXT |= {"pad_token_id": 10, "bos_token_id": 11, "eos_token_id": 12}
BOTH = {"text_config": TEXT, "vision_config": {**SIZES, "image_size": 32, "patch_size": 8}}
KINDS = {
    "clip": lambda: CLIPModel(CLIPConfig(**BOTH, projection_dim=64)),
    "siglip": lambda: SiglipModel(SiglipConfig(**BOTH)),
}


def batches(count: int, size: int) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Images of digits and their names, of one token each, with the numbers of both."""
    from timm.data import create_transform

    rows = data.DATASETS["digits"].load().train
    prepare = create_transform((3, 32, 32), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0)
    found = []
    for number in range(count):
        part = rows[number * size : (number + 1) * size]
        labels = torch.tensor(part["label"])
        pixels = torch.stack([prepare(image.convert("RGB")) for image in part["image"]])
        ids = torch.full((size, 8), 10)
        ids[:, 0], ids[:, 1], ids[:, 2] = 11, labels, 12
        places = torch.arange(1, size + 1) + number * size
        inputs = {"pixel_values": pixels, "input_ids": ids}
        found.append((inputs, torch.stack([places, -1 - labels], 1)))
    return found


def gradient(net: nn.Module, family: TwoTowers, job: Job, batch: tuple[object, Tensor]) -> Tensor:
    with autocast(torch.device("cpu"), job):
        loss = family.losses(job)(net.train(), *batch, "mean")
    loss.backward()
    return torch.cat([p.grad.flatten().double() for p in net.parameters() if p.grad is not None])


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_in_a_tenth_of_the_bytes(kind):
    model = KINDS[kind]()
    pretrained = PretrainedFiles(kind, kind, {"model_type": kind, **model.config.to_dict()})
    family = TwoTowers(name=kind, summary="", task="embedding", pretrained=pretrained)
    job = Job(kind, "d", task="embedding", batch_size=64, precision="bf16")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    *trained, last = batches(20, 64)
    losses = []
    for batch in trained * 3:
        loss = family.losses(job)(model.train(), *batch, "mean")
        loss.backward()
        losses.append(loss.item())
        optimizer.step(), optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
    exact = gradient(copy.deepcopy(model), family, job, last)
    options = JobForward(family, job, 2).options
    full = traced_bytes(model, last[0], **options)
    sparsify_within(model, Recipe("razor", 0.9), last[0], **options)
    assert traced_bytes(model, last[0], **options) <= 0.1 * full
    found = gradient(model, family, job, last)
    assert F.cosine_similarity(found, exact, 0) > 0.995


def test_the_scale_of_clip_is_at_most_100_and_can_fall():
    model = KINDS["clip"]()
    pretrained = PretrainedFiles("clip", "clip", {"model_type": "clip", **model.config.to_dict()})
    family = TwoTowers(name="clip", summary="", task="embedding", pretrained=pretrained)
    job = Job("clip", "d", task="embedding", batch_size=8, precision="fp32")
    model.logit_scale.data.fill_(9.0)
    family.losses(job)(model.train(), *batches(1, 8)[0], "mean").backward()
    assert model.logit_scale.item() == pytest.approx(LARGEST)
    assert model.logit_scale.grad > 0
