"""Frozen weights by depth and by names, and what cannot be frozen."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from razorctl import restore, sparsify
from razorctl.config.job import Job
from razorctl.config.recipe import Recipe
from razorctl.errors import UsageError
from razorctl.optimizer import parameter_groups
from razorctl.surgery.freezing import freeze_weights
from tests.cli.commands import assert_ends_with_an_error, finetune
from tests.models import bert, gpt2, vit


def job(freeze: str) -> Job:
    return Job("m", "d", freeze=freeze, learning_rate=0.1, weight_decay=0.0)


FROZEN = {
    "a block of a ViT": (vit, "1", {"cls_token", "pos_embed", "patch_embed", "blocks.0"}),
    "before the blocks": (vit, "0", {"cls_token", "pos_embed", "patch_embed"}),
    "a block of a BERT": (bert, "1", {"bert.embeddings", "bert.encoder.layer.0"}),
    "a block of a decoder": (
        gpt2,
        "1",
        {"transformer.wte", "transformer.wpe", "transformer.h.0"},
    ),
    "modules": (vit, "patch_embed, blocks.[01].attn", {"patch_embed", "blocks.?.attn"}),
}


@pytest.mark.parametrize("case", FROZEN)
def test_what_is_frozen(case):
    build, freeze, parts = FROZEN[case]
    model = build()
    freeze_weights(model, job(freeze), None)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    inside = {
        name
        for name, _ in model.named_parameters()
        if any(f"{name}.".startswith(f"{p}.") for q in parts for p in (q, q.replace("?", "0")))
        or any(f"{name}.".startswith(f"{q.replace('?', '1')}.") for q in parts)
    }
    assert frozen == inside


REFUSED = {
    "nothing": ("blocks.7,head", "freeze 'blocks.7' matches no weight of m, whose weights are"),
    "all by names": ("*", "freeze '*' leaves no weight of m to train"),
    "all by depth": ("9", "freeze '9' leaves no weight of m to train"),
    "an empty pattern": ("head,", "freeze '' matches no weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_frozen(case):
    freeze, sentence = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        freeze_weights(vit(), job(freeze), None)
    assert str(caught.value).startswith(sentence)


def test_a_method_that_trains_other_weights():
    with pytest.raises(UsageError, match="freeze all other weights; leave --freeze out"):
        freeze_weights(vit(), job("1"), Recipe("lora").part)
    model = vit().requires_grad_(False)
    with pytest.raises(UsageError, match="leaves nothing of what the method trains; freeze less"):
        parameter_groups(model, job("head"))


class Normed(nn.Module):
    """Two stages with batch norms, one without weights, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, affine=False))
        self.hidden, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.hidden(self.second(self.first(x)).mean((2, 3))))


@pytest.mark.parametrize(
    ("change", "moved"),
    [
        (lambda m: sparsify(m, Recipe("full")), {"first", "second"}),
        (lambda m: sparsify(m, Recipe("head")), set()),
        (lambda m: sparsify(m, Recipe("bias")), {"second"}),  # whose convolution's bias is trained
        (lambda m: sparsify(m, Recipe("lora")), set()),
        (lambda m: sparsify(m, Recipe("razor", lora=True)), set()),
        (lambda m: freeze_weights(m, job("first"), None), {"second"}),
    ],
)
def test_frozen_batch_norms_keep_their_statistics(change, moved):
    torch.manual_seed(0)
    model = Normed()
    change(model)
    twin = copy.deepcopy(model)
    for net in (model, twin, pickle.loads(pickle.dumps(model))):
        before = {name: buffer.clone() for name, buffer in net.named_buffers()}
        net.eval()
        net.train()
        net(torch.randn(4, 3, 8, 8)).sum().backward()
        changed = {n for n, b in net.named_buffers() if not torch.equal(b, before[n])}
        assert {name.split(".")[0] for name in changed} == moved
        restore(net)
    net(torch.randn(4, 3, 8, 8))
    frozen = next(net.parameters()).requires_grad
    assert net.first[1].training == frozen


@pytest.mark.usefixtures("shallow")
def test_a_run_changes_no_frozen_weight_and_loads_by_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, words in (("a", []), ("b", ["--workers", "1"])):
        result = finetune("--out", name, "--freeze", "0", "--ratio", "0.5", "--steps", "2", *words)
        assert result.exit_code == 0, result.stderr
    one, other = (load_file(Path(name, "model.safetensors")) for name in "ab")
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    from razorctl import models

    torch.manual_seed(0)
    before = models.find("vit-micro").build(10).state_dict()
    changed = {name for name, weight in one.items() if not torch.equal(weight, before[name])}
    assert changed
    assert not {name for name in changed if name.startswith(("patch_embed", "pos_embed"))}
    result = finetune("--out", "c", "--freeze", "nothing*")
    assert result.exit_code == 2
    assert_ends_with_an_error(result, "freeze 'nothing*' matches no weight of vit-micro")
