"""Whole models with their own activation checkpointing on: they train as without it."""

import copy

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    RobertaConfig,
    RobertaForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from razorctl import Recipe, restore, sparsify
from razorctl.layers.base import RazorLayer
from razorctl.memory.saved import saved_bytes
from tests.models import TEXT, bert, vit

BATCH = {"input_ids": torch.arange(2, 34).view(2, 16), "labels": torch.tensor([0, 1])}
POST_NORM = {
    "bert": bert,
    "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**TEXT)),
}


def model(name: str) -> nn.Module:
    """With norms that differ from fresh ones, whose output is what they normalize to."""
    torch.manual_seed(0)
    net = POST_NORM[name]().train()
    for module in net.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1, 0.3)
            nn.init.normal_(module.bias, 0, 0.3)
    return net


def forget_at_borders(net: nn.Module) -> None:
    """Shares what layers keep where checkpointing, which this does without, lets them."""
    memo = next(m.memo for m in net.modules() if isinstance(m, RazorLayer))
    for layer in net.base_model.encoder.layer:
        layer.register_forward_pre_hook(lambda *_: memo.clear())
        layer.register_forward_hook(lambda *_: memo.clear())


def gradients(net: nn.Module) -> list[Tensor | None]:
    torch.manual_seed(1)  # of dropout
    net(**BATCH).loss.backward()
    return [p.grad for p in net.parameters()]


def assert_equal(got: list[Tensor | None], want: list[Tensor | None]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("first", ["checkpointing", "sparsify"])
@pytest.mark.parametrize(("name", "method"), [("bert", "razor"), ("roberta", "int8")])
def test_post_norm_blocks(name, method, first, reentrant):
    net = model(name)
    twin = copy.deepcopy(net)
    sparsify(net, Recipe(method))
    forget_at_borders(net)
    if first == "sparsify":
        sparsify(twin, Recipe(method))
    twin.activation_checkpointing_enable({"use_reentrant": reentrant})
    if first == "checkpointing":
        sparsify(twin, Recipe(method))
    assert_equal(gradients(twin), gradients(net))


@pytest.mark.parametrize("reentrant", [False, True])
def test_post_norm_blocks_under_a_joint_budget(reentrant):
    net = model("bert")
    twin = copy.deepcopy(net)
    twin.activation_checkpointing_enable({"use_reentrant": reentrant})
    for m in (net, twin):
        sparsify(m, Recipe(joint_budget=0.5))
    forget_at_borders(net)
    for _ in range(2):
        for m in (net, twin):
            m.zero_grad()
        assert_equal(gradients(twin), gradients(net))
    assert any(p.grad is None for p in net.parameters())


def test_a_trainer_that_checkpoints(tmp_path):
    class Texts(Dataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {key: value[index] for key, value in BATCH.items()}

    net = model("bert")
    sparsify(net)
    arguments = TrainingArguments(
        str(tmp_path),
        gradient_checkpointing=True,
        max_steps=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    before = net.bert.encoder.layer[0].attention.self.query.weight.detach().clone()
    assert Trainer(net, arguments, train_dataset=Texts()).train().global_step == 2
    assert not torch.equal(net.bert.encoder.layer[0].attention.self.query.weight, before)


def test_what_was_on_before_stays_on():
    net = timm.create_model("vit_tiny_patch16_224", depth=1)
    net.set_grad_checkpointing()
    sparsify(net, Recipe("checkpoint"))
    restore(net)
    assert net.grad_checkpointing


@pytest.mark.parametrize("method", ["checkpoint", "lora"])
def test_embeddings_want_no_gradient_afterwards(method):
    net = bert()
    sparsify(net, Recipe(method))
    restore(net)
    net.requires_grad_(False)
    assert not net(torch.zeros(1, 4, dtype=torch.long)).logits.requires_grad


def test_pre_norm_blocks_share_as_without():
    torch.manual_seed(0)
    net = vit()
    sparsify(net.train())
    twin = copy.deepcopy(net)
    twin.set_grad_checkpointing()
    x = torch.randn(2, 3, 16, 16)
    assert saved_bytes(twin, x) < saved_bytes(net, x)
    for m in (net, twin):
        m(x).square().sum().backward()
    assert_equal([p.grad for p in twin.parameters()], [p.grad for p in net.parameters()])
