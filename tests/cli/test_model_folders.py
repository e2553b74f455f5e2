"""A folder of a model that cannot be trained or saved is refused before step 1, by each command."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from timm import create_model
from timm.models import save_for_hf
from transformers import (
    CLIPConfig,
    CLIPForImageClassification,
    SiglipConfig,
    SiglipForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from razorctl import models
from razorctl.config.job import Job
from razorctl.errors import DataError
from razorctl.models import weights
from razorctl.planning import job_trace
from tests import own
from tests.cli.commands import razorctl
from tests.cli.kinds import HIDDEN

CONFIG, TOKENIZER, PROCESSOR = "config.json", "tokenizer_config.json", "preprocessor_config.json"
DATA = {"bert": "texts.csv", "llama": "chats.jsonl", "segformer": "shapes"}  # others: photos
VISION = {**HIDDEN, "num_attention_heads": 2, "image_size": 32, "patch_size": 16}
MANY = 10**9
# Of what folder, in which file: settings that are not so, and a part of the error.
CASES: list[tuple[str, str, dict[str, Any], str]] = [
    ("bert", CONFIG, {"output_attentions": True}, "`output_attentions` attribute is not supported"),
    ("bert", CONFIG, {"num_attention_heads": -1}, "invalid shape dimension -24"),
    ("bert", CONFIG, {"num_hidden_layers": MANY}, "num_hidden_layers = 1000000000, and 42 weights"),
    ("bert", CONFIG, {"num_hidden_layers": 0}, "correct num_hidden_layers in"),
    ("bert", CONFIG, {"hidden_size": MANY}, "correct hidden_size in"),
    ("bert", CONFIG, {"pad_token_id": -1}, "pad_token_id is -1, and its embedding has 47 rows"),
    ("bert", CONFIG, {"id2label": {"x": "a"}}, "config.json"),
    ("bert", CONFIG, {"dtype": "int8"}, "torch.int8"),
    ("bert", CONFIG, {"model_type": "llama"}, "model.embed_tokens.weight is not among its weights"),
    ("bert", TOKENIZER, {"model_max_length": "x"}, "tokenizer_config.json"),
    ("llama", CONFIG, {"num_key_value_heads": 1}, "k_proj.weight is [12, 24] in its weights"),
    ("llama", CONFIG, {"rope_parameters": {"rope_type": "new"}}, "'new'"),
    ("llama", CONFIG, {"eos_token_id": [2, 999]}, "eos_token_id is 999"),
    ("vit", CONFIG, {"image_size": 10**6}, "position_embeddings is [1, 5, 24] in its weights"),
    ("vit", PROCESSOR, {"image_std": [0, 0, 0]}, PROCESSOR),
    ("clip", CONFIG, {"vision_config": {"num_hidden_layers": MANY}}, "num_hidden_layers = 10000"),
    ("siglip", CONFIG, {"vision_config": {"hidden_size": 32}}, "correct vision_config.hidden_size"),
    ("segformer", CONFIG, {"depths": [1, 1, 1, MANY]}, "depths = 1000000000, and 124 weights"),
    ("timm", CONFIG, {"model_args": {"depth": MANY}}, "depth = 1000000000, and 32 weights"),
    ("timm", CONFIG, {"model_args": {"depth": 1}}, "Unexpected key(s) in state_dict"),
    ("timm", CONFIG, {"model_args": "x"}, "not a mapping"),
    ("resnet", CONFIG, {"num_classes": "x"}, "config.json"),
    ("bert", CONFIG, {"hidden_dropout_prob": float("nan")}, "correct hidden_dropout_prob in"),
    ("bert", CONFIG, {"vocab_size": 46}, "[46, 24] by its config); correct vocab_size in"),
    ("bert", TOKENIZER, {"padding_side": "up"}, "correct padding_side in model/tokenizer_config"),
    ("llama", CONFIG, {"tie_word_embeddings": True}, "embed_tokens.weight differ, and its config"),
    ("llama", CONFIG, {"attention_bias": True}, "correct attention_bias in"),
    ("gpt2", CONFIG, {"tie_word_embeddings": False}, "correct tie_word_embeddings in"),
    ("vit", CONFIG, {"qkv_bias": False}, "k_proj.bias is among its weights, and not in the model"),
    ("vit", PROCESSOR, {"image_std": [float("nan")] * 3}, "correct image_std in"),
    ("timm", CONFIG, {"pretrained_cfg": {"classifier": "no"}}, "size mismatch for head.weight"),
]


@pytest.fixture(scope="module")
def folders(kinds: Path) -> Path:
    vision = {"text_config": {**HIDDEN, "num_attention_heads": 2}, "vision_config": VISION}
    for name, model in (
        ("vit", ViTForImageClassification(ViTConfig(**VISION))),
        ("clip", CLIPForImageClassification(CLIPConfig(**vision))),
        ("siglip", SiglipForImageClassification(SiglipConfig(**vision))),
    ):
        model.save_pretrained(kinds / name)
        (kinds / name / PROCESSOR).write_text("{}")
    args = {"img_size": 32, "depth": 2, "embed_dim": 24, "num_heads": 2}
    vit = create_model("vit_tiny_patch16_224", num_classes=10, **args)
    save_for_hf(vit, kinds / "timm", model_args=args, safe_serialization=True)
    own.photos(kinds / "photos", 8)
    own.texts(kinds / "texts.csv", 40)
    return kinds


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {**settings, **changes}
    for name in {"vision_config", "model_args", "pretrained_cfg"} & changes.keys():
        if isinstance(changes[name], dict):
            both[name] = {**settings[name], **changes[name]}
    return both


def changed(folder: Path, file: str, changes: dict[str, Any]) -> None:
    """Copies a folder of a model to ./model, with other settings in one of its files."""
    copytree(folder, "model")
    settings = json.loads(Path("model", file).read_text())
    Path("model", file).write_text(json.dumps(merged(settings, changes)))


def commands(data: Path) -> dict[str, list[str]]:
    small = ["--batch-size", "4"]
    train = ["finetune", "./model", str(data), *small, "--steps", "1", "--device", "cpu"]
    return {
        "plan": ["plan", "./model", str(data), *small, "--vram", "24GB", "--method", "razor"],
        "finetune": [*train, "--out", "run"],
        "dry run": [*train, "--out", "run", "--dry-run"],
        "profile": ["profile", "./model", *small, "--steps", "1", "--device", "cpu"],
    }


def refused(command: list[str], sentence: str) -> None:
    result = razorctl(*command)
    assert result.exit_code == 5, command
    *_, last = result.stderr.splitlines()
    assert last.startswith("error: ")
    assert sentence in last
    assert "model" in last


def blueprinted() -> None:
    """Tries ./model as every command does before it begins."""
    job_trace.blueprint(Job("./model", "any", task=models.find("./model").task), 2)


@pytest.fixture(autouse=True)
def seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how long the setting at fault is looked for, which is not at all without it."""
    monkeypatch.setattr(weights, "SECONDS", -1)
    return partial(monkeypatch.setattr, weights, "SECONDS")


@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_does_not_agree_is_refused(
    number: int, folders: Path, seconds: Callable[[float], None]
):
    kind, file, changes, sentence = CASES[number]
    if "correct" in sentence:
        seconds(60)
    changed(folders / kind, file, changes)
    with pytest.raises(DataError, match=re.escape(sentence)):
        blueprinted()


def test_every_command_refuses_a_folder(folders: Path):
    kind, file, changes, sentence = CASES[0]
    changed(folders / kind, file, changes)
    for command in commands(folders / DATA.get(kind, "photos")).values():
        refused(command, sentence)
        assert {path.name for path in Path().iterdir()} == {"model"}


# Changes of the weights of a folder -> what is said or raised; None for nothing.
WEIGHTS: dict[str, tuple[str, Callable[[Any], Any], str | None]] = {
    "a head that is tied": (
        "gpt2",
        lambda w: {**w, "lm_head.weight": w["transformer.wte.weight"].clone()},
        None,
    ),
    "another head than the tied one": (
        "gpt2",
        lambda w: {**w, "lm_head.weight": w["transformer.wte.weight"] + 1},
        "lm_head.weight and transformer.wte.weight differ",
    ),
    "a lost weight": (
        "gpt2",
        lambda w: {name: w[name] for name in w if name != "transformer.h.0.ln_1.bias"},
        "transformer.h.0.ln_1.bias is not among its weights",
    ),
    "a weight of a layer": (
        "gpt2",
        lambda w: {**w, "transformer.h.1.attn.norm.bias": w["transformer.ln_f.bias"].clone()},
        "transformer.h.1.attn.norm.bias is among its weights",
    ),
    "a weight of no layer": (
        "gpt2",
        lambda w: {**w, "transformer.other.bias": w["transformer.ln_f.bias"].clone()},
        "left out (transformer.other)",
    ),
    "a pooler": (
        "bert",
        lambda w: {**w, "bert.pooler.dense.bias": w["bert.embeddings.LayerNorm.bias"].clone()},
        None,
    ),
    "positions": ("bert", lambda w: {**w, "bert.embeddings.position_ids": torch.arange(64)}, None),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights_without_a_place(case: str, folders: Path, caplog: pytest.LogCaptureFixture):
    kind, change, sentence = WEIGHTS[case]
    changed(folders / kind, CONFIG, {})
    changed_weights = change(load_file("model/model.safetensors"))
    save_file(changed_weights, "model/model.safetensors", {"format": "pt"})
    if sentence is None or sentence.startswith("left out"):
        blueprinted()
        said = [record.getMessage() for record in caplog.records if "razorctl" in record.name]
        assert len(said) == (sentence is not None)
        assert all(str(sentence) in line for line in said)
    else:
        with pytest.raises(DataError, match=re.escape(sentence)):
            blueprinted()


def test_a_chat_template_that_refuses_in_its_own_words_is_left_to_the_data(folders: Path):
    changed(folders / "llama", CONFIG, {})
    Path("model/chat_template.jinja").write_text("{{ raise_exception('no system messages') }}")
    blueprinted()
    Path("model/chat_template.jinja").write_text("{{ messages[9].content }}")
    with pytest.raises(DataError, match="does not take a conversation"):
        blueprinted()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"rope_parameters": {"rope_theta": 0}}),
        ("vit", {"layer_norm_eps": -10.0}),
    ],
)
def test_an_output_that_is_not_finite_is_refused_before_step_1(kind: str, changes: dict, folders):
    changed(folders / kind, CONFIG, changes)
    data = commands(folders / DATA.get(kind, "photos"))
    refused(data["finetune"], "has an output that is not finite before it is trained")
    assert not Path("run", "checkpoints").exists()


@pytest.mark.parametrize("kind", ["clip", "timm"])  # others are trained in test_kinds.py
def test_a_good_folder_is_trained(kind: str, folders: Path):
    changed(folders / kind, CONFIG, {})
    data = commands(folders / DATA.get(kind, "photos"))
    assert razorctl(*data["dry run"]).exit_code == 0


def test_other_layers_are_no_matter_from_scratch(folders: Path):
    changed(folders / "bert", CONFIG, {"num_hidden_layers": 3})
    train = [*commands(folders / "texts.csv")["dry run"], "--method", "full"]
    assert razorctl(*train).exit_code == 5
    assert razorctl(*train, "--from-scratch").exit_code == 0


def test_a_plan_is_of_the_files_as_they_are(folders: Path):
    changed(folders / "bert", CONFIG, {})
    plan = [*commands(folders / "texts.csv")["plan"], "--method", "full"]
    assert razorctl(*plan).exit_code == 0
    config = json.loads(Path("model", CONFIG).read_text())
    Path("model", CONFIG).write_text(json.dumps({**config, "intermediate_size": 50}))
    assert razorctl(*plan).exit_code == 5


@pytest.mark.parametrize(
    "template", ["{% for i in range(1000000) %}{% endfor %}", "{{ 1 + 'a' }}", "{% for"]
)
def test_a_chat_template_that_raises(template: str, folders: Path):
    changed(folders / "llama", CONFIG, {})
    Path("model/chat_template.jinja").write_text(template)
    for name, command in commands(folders / "chats.jsonl").items():
        if name != "profile":  # random batches have no conversations
            refused(command, "the chat template of the model does not take")
