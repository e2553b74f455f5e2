"""Whole models with their own activation checkpointing on: they train as without it."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import timm
import torch
from timm.models import vision_transformer as timm_vit
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from transformers import (
    RobertaConfig,
    RobertaForSequenceClassification,
)

from razorctl import Recipe, restore, saved_bytes, sparsify
from razorctl.errors import UsageError
from razorctl.layers.base import RazorLayer
from razorctl.memory.saved import traced_bytes
from razorctl.surgery import checkpointing
from razorctl.surgery.byte_budget import sparsify_within
from razorctl.training.kept_bytes import trace_kept_bytes
from tests.models import SMALL, TEXT, bert, checkpoint, vit
from tests.surgery.test_methods import cosine, step

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
    checkpoint(twin, reentrant)
    if first == "checkpointing":
        sparsify(twin, Recipe(method))
    assert_equal(gradients(twin), gradients(net))


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
    assert traced_bytes(twin, x) < traced_bytes(net, x)
    for m in (net, twin):
        m(x).square().sum().backward()
    assert_equal([p.grad for p in twin.parameters()], [p.grad for p in net.parameters()])


class TestWithAnyMethod:
    """`activation_checkpointing` of a recipe."""

    @pytest.fixture(params=SMALL)
    def built(self, request) -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        model, batch = SMALL[request.param]
        return model().train(), batch()

    @pytest.mark.parametrize(
        "recipe",
        [
            Recipe(ratio=0.5),
            Recipe("backrazor", 0.5),
            Recipe(ratio=0.5, joint_budget=0.5, joint="branches"),
            Recipe(ratio=0.5, lora=True),
        ],
        ids=lambda recipe: f"{recipe.method} {recipe.joint_budget} {recipe.lora}",
    )
    def test_gradients_are_those_without_it(self, built, recipe):
        net, x = built
        twin, stock = copy.deepcopy(net), copy.deepcopy(net)
        for model, on in ((net, False), (twin, True)):
            torch.manual_seed(2)  # of adapters
            sparsify(model, replace(recipe, activation_checkpointing=on))
        want, got = step(net, x), step(twin, x)
        assert torch.equal(got[0], want[0])
        assert all((a is None) == (b is None) for a, b in zip(got, want, strict=True))
        # Blocks of BERT share a copy with the block before, which checkpointing keeps apart.
        assert cosine(got[1:], want[1:]) > (0.99 if hasattr(net, "bert") else 1 - 1e-12)
        restore(twin)
        assert torch.equal(step(twin, x)[0], step(stock, x)[0])

    def test_a_byte_budget_is_met_with_and_without_it(self):
        net, x = vit(depth=6).train(), torch.randn(64, 3, 16, 16)
        full, rules = traced_bytes(net, x), []
        for on in (False, True):
            sparsify_within(net, Recipe(ratio=0.85, activation_checkpointing=on), x)
            rules.append([repr(vars(m.rules.wide)) for m in razor_layers(net)])
            assert traced_bytes(net, x) <= 0.15 * full
            restore(net)
        assert rules[0] == rules[1]

    def test_a_byte_budget_below_the_inputs_of_blocks_is_refused(self):
        net, x = vit(depth=6).train(), torch.randn(64, 3, 16, 16)
        bf16 = {"autocast": torch.bfloat16}  # in which the inputs of blocks are twice as wide
        full = traced_bytes(net, x, **bf16)
        before = step(net, x)
        recipe = Recipe(ratio=0.9, activation_checkpointing=True)
        with pytest.raises(UsageError, match="activation checkpointing stores") as refused:
            sparsify_within(net, recipe, x, **bf16)
        most = float(str(refused.value).removesuffix(".").split()[-1])
        assert torch.equal(step(net, x)[0], before[0])
        assert not razor_layers(net)
        sparsify_within(net, replace(recipe, ratio=most), x, **bf16)
        assert 0.1 * full < traced_bytes(net, x, **bf16) <= (1 - most) * full


def wrapped(net: nn.Module) -> None:
    apply_activation_checkpointing(net, check_fn=lambda part: isinstance(part, timm_vit.Block))


class TestOfTheModelItself:
    """Checkpointing that is on before razorctl comes."""

    SWITCHES = (
        pytest.param(bert, lambda net: net.activation_checkpointing_enable(), id="transformers"),
        pytest.param(partial(vit, depth=3), lambda net: net.set_grad_checkpointing(), id="timm"),
        pytest.param(partial(vit, depth=3), wrapped, id="torch"),
    )

    @pytest.mark.parametrize(("build", "switch"), SWITCHES)
    def test_full_is_without_it_and_it_is_named(self, build, switch, caplog):
        torch.manual_seed(0)
        net = build().train()
        x = torch.randn(16, 3, 16, 16) if build is not bert else torch.ones(4, 16, dtype=torch.long)
        full = saved_bytes(net, x)
        assert "checkpointing" not in caplog.text
        plain = copy.deepcopy(net)
        sparsify_within(plain, Recipe(ratio=0.8), x)
        switch(net)
        assert saved_bytes(net, x) < full
        caplog.clear()
        sparsify_within(net, Recipe(ratio=0.8), x)
        assert [r.getMessage() for r in caplog.records if "checkpointing enabled" in r.msg]
        caplog.clear()
        assert saved_bytes(net, x) <= 0.2 * full
        rows = trace_kept_bytes(net, x).rows
        assert sum(row.full_saved_bytes for row in rows) == full
        assert "more than" not in caplog.text
        rules = (
            [repr(vars(m.rules.wide)) for m in razor_layers(each) if m.rules]
            for each in (net, plain)
        )
        assert next(rules) == next(rules)
        restore(net)
        assert any(map(checkpointing.on, net.modules()))

    def test_a_budget_that_it_alone_exceeds_is_refused_with_it(self):
        net, x = vit(depth=3).train(), torch.randn(64, 3, 16, 16)
        net.set_grad_checkpointing()
        with pytest.raises(UsageError, match="checkpoints activations, which razor does not need"):
            sparsify_within(net, Recipe(ratio=0.98), x)
        assert not razor_layers(net)
        assert net.grad_checkpointing


def razor_layers(net: nn.Module) -> list[RazorLayer]:
    return [m for m in net.modules() if isinstance(m, RazorLayer)]
