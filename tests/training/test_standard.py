"""Targets of a regression: what the head learns, and that it gives them as they are at the end."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

from razorctl import Recipe, sparsify
from razorctl.config.job import Job
from razorctl.training.standard import Standard

JOB = Job("m", "d", task="regression", precision="fp32")
AGES = [20.0, 35.0, 50.0, 65.0]
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}


def of_text(kind: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SMALL, **options, num_labels=1)
    return transformers.AutoModelForSequenceClassification.from_config(config)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=1, n_head=2, num_labels=1, pad_token_id=0
    )
    return transformers.GPT2ForSequenceClassification(config)


def of_image(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=1, img_size=32, **options)


SIZES = {"embed_dim": 16, "depth": 1, "num_heads": 2}
MODELS: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # and whether its head has a bias
    "bert": (lambda: of_text("bert", intermediate_size=16), True),
    "roberta": (lambda: of_text("roberta", intermediate_size=16), True),
    "gpt2": (gpt2, False),
    "vit": (lambda: of_image("vit_tiny_patch16_224", **SIZES), True),
}


def logits(model: nn.Module, inputs: Tensor) -> Tensor:
    output = model(inputs)
    return output if isinstance(output, Tensor) else output.logits


def batch(model: nn.Module) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    texts = hasattr(model, "config")
    inputs = torch.randint(2, 32, (4, 8)) if texts else torch.randn(4, 3, 32, 32)
    return inputs, torch.tensor(AGES)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_folded_head_gives_the_targets_as_they_are(name: str, sparse: bool) -> None:
    build, bias = MODELS[name]
    model = build().eval()
    inputs, _ = rows = batch(model)
    standard = Standard.of(AGES, model)
    assert standard.mean == (42.5 if bias else 0)
    assert standard.fitted(model, logits, rows, JOB) == standard
    if sparse:
        sparsify(model, Recipe("razor"))
    before = logits(model, inputs)
    want = standard.logits(logits)(model, inputs)
    standard.fold(model)
    torch.testing.assert_close(logits(model, inputs), want)
    standard.unfold(model)
    torch.testing.assert_close(logits(model, inputs), before)


def test_targets_are_learned_in_deviations_from_their_mean() -> None:
    standard = Standard.of(AGES, MODELS["vit"][0]())
    learned = standard.labels(torch.tensor(AGES))
    assert learned.mean() == pytest.approx(0, abs=1e-6)
    assert learned.square().mean() == pytest.approx(1)
    alike = Standard.of([7.0, 7.0], MODELS["vit"][0]())
    assert (alike.mean, alike.deviation) == (7, 1)
    assert Standard.of(AGES, nn.ReLU()) == Standard()


def test_a_head_that_was_trained_goes_on() -> None:
    """A model that gives ages within some years is one whose head was folded."""
    model = MODELS["bert"][0]().eval()
    inputs, _ = rows = batch(model)
    standard = Standard.of(AGES, model)
    standard.fold(model)
    trained = logits(model, inputs)
    assert standard.fitted(model, logits, rows, JOB) == standard
    torch.testing.assert_close(standard.logits(logits)(model, inputs), trained)


def test_a_model_of_several_heads_learns_the_targets_as_they_are() -> None:
    model = of_image("deit_tiny_distilled_patch16_224", **SIZES)
    twin = copy.deepcopy(model)
    standard = Standard.of(AGES, model).fitted(model, logits, batch(model), JOB)
    assert standard == Standard()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert model.training
