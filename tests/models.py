"""Small models that tests of several rooms build."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from timm import create_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    SegformerConfig,
    SegformerForSemanticSegmentation,
)

from razorctl import data, models
from razorctl.data import Source, Splits
from razorctl.models import Model, ModelEntry, timm, transformers
from razorctl.models.timm.micro import VIT_MICRO
from razorctl.models.transformers.repositories import DECODER, ENCODER, REPOSITORIES
from razorctl.planning import job_trace


def vit(**settings: Any) -> VisionTransformer:
    """Of 16 tokens of 24 columns in two blocks, for images of 16 pixels."""
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
    return VisionTransformer(**{"num_classes": 5, **sizes, **settings})


TEXT = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 48,
    "vocab_size": 50,
}


def checkpoint(model: nn.Module, reentrant: bool) -> None:
    """Switches on a model's own checkpointing, by the name that a release of transformers has."""
    old = getattr(model, "gradient_checkpointing_enable", None)
    enable = getattr(model, "activation_checkpointing_enable", old)
    enable({"use_reentrant": reentrant})


def bert(dropout: float = 0.1, **settings: Any) -> BertForSequenceClassification:
    """Of tokens of 24 columns in two layers."""
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return BertForSequenceClassification(BertConfig(**{**TEXT, **dropouts, **settings}))


def gpt2() -> GPT2LMHeadModel:
    """Of tokens of 24 columns in two layers; its output embeddings are its input embeddings."""
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "vocab_size": 50, "n_positions": 32}
    dropouts = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=1, eos_token_id=2))


def llama(**settings: Any) -> LlamaForCausalLM:
    """Of tokens of 24 columns in two layers."""
    sizes = {**TEXT, "max_position_embeddings": 32, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **settings}))


def segformer(classes: int = 5) -> SegformerForSemanticSegmentation:
    """Of a block in each of four stages."""
    config = SegformerConfig(
        depths=[1] * 4,
        hidden_sizes=[8, 8, 16, 16],
        decoder_hidden_size=8,
        num_attention_heads=[1, 1, 2, 2],
        num_labels=classes,
        drop_path_rate=0.0,
    )
    return SegformerForSemanticSegmentation(config)


class Text(nn.Module):
    """The small BERT without dropout; it takes tokens alone and gives logits."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = bert(dropout=0.0)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.bert(ids).logits
        return logits


# By kind: a model and a batch.
SMALL = {
    "vit": (lambda: vit(init_values=0.5), lambda: torch.randn(6, 3, 16, 16)),
    "bert": (Text, lambda: torch.randint(50, (6, 11))),
}


def _vit(classes: int, input_size: int | None = None) -> nn.Module:
    size = {} if input_size is None else {"img_size": input_size}
    model: nn.Module = create_model("test_vit.r160_in1k", num_classes=classes, depth=2, **size)
    return model


def altered(model: Model, name: str | None = None, **methods: Any) -> Model:
    """A model with other methods, which take no `self`."""
    kind = type(model)
    values = {part.name: getattr(model, part.name) for part in fields(model)}
    other: Any = type(kind.__name__, (kind,), {at: staticmethod(of) for at, of in methods.items()})
    made: Model = other(**{**values, "name": name or model.name})
    return made


def entry(name: str, **changes: Any) -> ModelEntry:
    """A small vit, resnet, bert, gpt2 or llama, registered; `changes` are of its config."""
    if name == "resnet":
        return ModelEntry.single(
            timm.from_hub(name, "small", "test_resnet", {}).of("classification")
        )
    if name == "vit":
        model = timm.from_hub("vit", "small", "test_vit.r160_in1k", {})
        return ModelEntry.single(altered(model.of("classification"), bare=_vit))
    config = {"model_type": name, **TEXT, **changes}
    tasks = DECODER if name in ("llama", "gpt2") else ENCODER
    return transformers.from_hub(name, "small", "nobody/small", config, tasks)


def few_blocks(name: str, blocks: int = 2) -> ModelEntry:
    """vit-b16, timm's resnet18 or a registered model of transformers, with few blocks.

    Their widths are the same. A ResNet has so many blocks in each of its stages.
    """
    of_timm = {
        "vit-b16": ("vit_base_patch16_224", {"depth": blocks}),
        "timm:resnet18": ("resnet18", {"layers": (blocks,) * 4}),
    }
    if name in of_timm:
        (kind, few), model = of_timm[name], models.find(name)
        build = partial(create_model, kind, **few)
        return ModelEntry.single(
            altered(model, bare=lambda classes, _=None: build(num_classes=classes))
        )
    entry = REPOSITORIES[name]
    config = {**entry["config"], "num_hidden_layers": blocks}
    return transformers.from_hub(name, f"{blocks} layers", entry["repo"], config, entry["tasks"])


def few_tests(source: Source, rows: int = 72) -> Source:
    """With fewer rows to test on, read once."""
    read: list[Splits] = []

    def load(*args: Any) -> Splits:
        if not read:
            splits = source.load(*args)
            read.append(replace(splits, test=splits.test.select(range(rows))))
        return read[0]

    return replace(source, test_examples=rows, load=load)


@contextmanager
def registered(*entries: ModelEntry, shallow: bool = False) -> Iterator[None]:
    """Has these in the registry.

    `shallow` cuts vit-micro to two of six blocks, untrained, and the tests of digits to 72 rows.
    """
    with pytest.MonkeyPatch.context() as patch:
        if shallow:
            micro = models.find("vit-micro")
            patch.setitem(VIT_MICRO, "depth", 2)
            patch.setitem(data.DATASETS, "digits", few_tests(data.find("digits")))
            untrained = altered(
                micro, build=lambda classes, size=None, _=None: micro.bare(classes, size)
            )
            entries = (*entries, ModelEntry.single(untrained))
        for model in entries:
            patch.setitem(models.models(), model.name, model)
        job_trace._blueprint.cache_clear()
        yield
    job_trace._blueprint.cache_clear()


def torchvision_vit() -> nn.Module:
    """torchvision's ViT, whose head starts at zero in stock."""
    from torchvision.models import VisionTransformer

    model = VisionTransformer(16, 4, 2, 2, 24, 48, num_classes=5)
    nn.init.normal_(model.heads.head.weight, std=0.1)
    return model
