"""Checkpoints of another head than the one that is trained: what is new is said, once."""

import re
from pathlib import Path
from shutil import copytree

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from timm import create_model
from timm.models import save_for_hf
from torchvision.models import get_model, get_model_weights
from transformers import (
    BartConfig,
    BertConfig,
    DistilBertConfig,
    LlamaConfig,
    OwlViTConfig,
    RobertaConfig,
    SegformerConfig,
    T5Config,
    ViTConfig,
    Wav2Vec2Config,
    WhisperConfig,
)

from razorctl import models
from razorctl.errors import DataError, UsageError

SIZES = {
    "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 40, "num_attention_heads": 2,
}  # fmt: skip
TEXT = {**SIZES, "vocab_size": 40}
IMAGE = {**SIZES, "image_size": 32, "patch_size": 16}
STAGES = {
    "depths": [1] * 4, "hidden_sizes": [8] * 4, "num_attention_heads": [1] * 4,
    "decoder_hidden_size": 16,
}  # fmt: skip
BOTH = {
    "d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 40,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
CONFIGS = {
    "Bert": BertConfig(**TEXT),
    "DistilBert": DistilBertConfig(vocab_size=40, dim=24, n_layers=2, n_heads=2, hidden_dim=40),
    "Roberta": RobertaConfig(**TEXT, pad_token_id=0),
    "Llama": LlamaConfig(**TEXT, num_key_value_heads=1),
    "ViT": ViTConfig(**IMAGE),
    "Segformer": SegformerConfig(**STAGES),
}
# Of what, for what: the parts that are new, if any.
HEADS = {
    "BertForMaskedLM": {"classification": "bert.pooler, classifier", "masked-lm": None},
    "BertModel": {"classification": "classifier", "masked-lm": "cls"},
    "BertForPreTraining": {"classification": "classifier", "masked-lm": None},
    "BertForSequenceClassification": {"classification": "classifier", "masked-lm": "cls"},
    "BertForTokenClassification": {"classification": "bert.pooler, classifier"},
    "DistilBertForMaskedLM": {"classification": "classifier, pre_classifier"},
    "DistilBertForSequenceClassification": {
        "masked-lm": "vocab_layer_norm, vocab_projector, vocab_transform"
    },
    "RobertaForMaskedLM": {"classification": "classifier"},
    "RobertaForSequenceClassification": {"masked-lm": "lm_head"},
    "LlamaModel": {"causal-lm": "lm_head", "classification": "score"},
    "LlamaForCausalLM": {"causal-lm": None, "classification": "score"},
    "LlamaForSequenceClassification": {"causal-lm": "lm_head"},
    "ViTModel": {"classification": "classifier"},
    "ViTForMaskedImageModeling": {"classification": "classifier"},
    "ViTForImageClassification": {"classification": "classifier"},
    "SegformerForImageClassification": {"segmentation": "decode_head"},
    "SegformerForSemanticSegmentation": {"segmentation": "decode_head.classifier"},
}
CASES = [(kind, task) for kind, tasks in HEADS.items() for task in tasks]


def written(kind: str) -> Path:
    """The folder of a small model of transformers of that class."""
    config = next(config for name, config in CONFIGS.items() if kind.startswith(name))
    getattr(transformers, kind)(config).save_pretrained(kind)
    return Path(kind)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("kind", "task"), CASES)
def test_a_head_of_another_kind(kind, task, caplog, capfd):
    expected, folder = HEADS[kind][task], written(kind)
    capfd.readouterr()
    model = models.find(f"./{folder}", task).build(3, None)
    messages = [
        record.getMessage() for record in caplog.records if record.name.startswith("razorctl")
    ]
    head = "classifier" if task == "classification" else "head"
    sentence = f"the {head} of ./{kind} is new; it is trained from random weights ({expected})"
    assert messages == ([] if expected is None else [sentence])
    assert capfd.readouterr() == ("", "")
    body = getattr(model, model.base_model_prefix).state_dict()
    whole = getattr(transformers, kind).from_pretrained(folder)
    stored = getattr(whole, whole.base_model_prefix, whole).state_dict()
    assert len(body) > 10
    for name, weight in body.items():
        if name in stored:
            assert torch.equal(weight, stored[name])
        else:
            assert "pooler" in name


def damaged(folder: Path, name: str, *, shape: bool = False) -> str:
    """The folder's copy without the first weight of that ending, or with one of another shape."""
    copytree(folder, "damaged")
    weights = load_file("damaged/model.safetensors")
    own = next(key for key in weights if key.endswith(name))
    if shape:
        weights[own] = torch.zeros(3, 3)
    else:
        del weights[own]
    save_file(weights, "damaged/model.safetensors", {"format": "pt"})
    return "./damaged"


BODY = "encoder.layer.1.output.dense.weight"
DAMAGES = {
    "a body for a classifier": ("BertForMaskedLM", BODY, "classification"),
    "a body without a head": ("BertModel", BODY, "masked-lm"),
    "a head of its own": ("BertForMaskedLM", "transform.dense.weight", "masked-lm"),
    "a pooler of its own": (
        "BertForSequenceClassification",
        "pooler.dense.weight",
        "classification",
    ),
    "a head of tokens": ("LlamaForCausalLM", "lm_head.weight", "causal-lm"),
    "a body of images": ("ViTModel", "layernorm.weight", "classification"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_weights_that_are_missing_are_no_new_head(case):
    kind, name, task = DAMAGES[case]
    folder = damaged(written(kind), name)
    with pytest.raises(DataError, match="is not among its weights") as error:
        models.find(folder, task).build(3, None)
    assert error.value.exit_code == 5


def test_a_body_of_another_shape_is_not_made_anew():
    folder = damaged(written("BertForSequenceClassification"), BODY, shape=True)
    with pytest.raises(DataError, match=r"1\.output\.dense\.weight is \[3, 3\] in its"):
        models.find(folder, "classification").build(3, None)


@pytest.mark.parametrize("task", ["classification", "segmentation"])
@pytest.mark.parametrize("classes", [0, 7])
def test_models_of_timm(classes, task, caplog):
    save_for_hf(create_model("test_resnet", num_classes=classes), "r", safe_serialization=True)
    model = models.find("./r", task).build(3, None)
    messages = ["the classifier of ./r is new; it is trained from random weights"]
    assert [record.getMessage() for record in caplog.records if "razorctl" in record.name] == (
        messages if task == "classification" else []
    )
    stored = load_file("r/model.safetensors")["layer1.0.conv1.weight"]
    assert any(
        torch.equal(weight, stored) for weight in model.parameters() if weight.shape == stored.shape
    )
    with pytest.raises(DataError, match=r"damaged cannot be read .*Missing key.*conv1"):
        models.find(damaged(Path("r"), "layer1.0.conv1.weight"), task).build(3, None)


@pytest.mark.parametrize("name", ["densenet121", "squeezenet1_1"])
def test_models_of_torchvision(name, monkeypatch):
    """Models whose weights are missing, or, of a DenseNet, called as they once were."""
    monkeypatch.setenv("TORCH_HOME", "home")
    file = Path("home/hub/checkpoints") / Path(get_model_weights(name).DEFAULT.url).name
    file.parent.mkdir(parents=True)
    weights = get_model(name).state_dict()
    old = {
        re.sub(r"(denselayer\d+\.(?:norm|conv))(\d)", r"\1.\2", key): w
        for key, w in weights.items()
    }
    torch.save(old, file)
    model = models.find(f"torchvision:{name}").build(3, None)
    assert (
        sum(torch.equal(w, weights[key]) for key, w in model.state_dict().items()) >= len(old) - 2
    )
    del old[next(key for key in old if key.endswith("weight"))]
    torch.save(old, file)
    with pytest.raises(DataError, match=r"0\.weight is not among its weights"):
        models.find(f"torchvision:{name}").build(3, None)


OTHERS = {
    "Whisper (speech to text)": ("WhisperForConditionalGeneration", WhisperConfig(**BOTH)),
    "T5 (text to text)": (
        "T5ForConditionalGeneration",
        T5Config(d_model=24, d_kv=12, d_ff=32, num_layers=1, num_heads=2, vocab_size=40),
    ),
    "Wav2Vec2 (speech to text)": ("Wav2Vec2ForCTC", Wav2Vec2Config()),
    "OwlViT (object detection)": ("OwlViTForObjectDetection", OwlViTConfig()),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_model_that_cannot_be_trained_is_named(what):
    kind, config = OTHERS[what]
    config.architectures = [kind]
    config.save_pretrained("m")
    with pytest.raises(UsageError) as error:
        models.named("./m")
    assert f"./m is a model of the type {what}, which razorctl cannot train; " in str(error.value)
    assert error.value.exit_code == 2


def test_an_encoder_with_a_decoder_is_for_masked_tokens_alone():
    BartConfig(**BOTH).save_pretrained("m")
    assert models.named("./m").tasks == ("masked-lm",)


FOLDERS = {
    "adapter_config.json": "m is an adapter of PEFT, not a model; merge it into its model",
    "model_index.json": "m is a pipeline of diffusers, which razorctl cannot train; name",
    "m-q4.gguf": "m is a model in the format of llama.cpp, which cannot be trained; name",
    "other.txt": "m has no config.json; name a folder",
}


@pytest.mark.parametrize("file", FOLDERS)
def test_a_folder_of_another_kind(file):
    Path("m").mkdir()
    Path("m", file).write_text("{}")
    with pytest.raises(DataError, match=FOLDERS[file]) as error:
        models.named("./m")
    assert error.value.exit_code == 5
