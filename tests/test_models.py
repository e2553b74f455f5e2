"""The contract of a model, for every model in the registry; the hub's are small local copies."""

import hashlib
import json
import pickle
import random
import subprocess
import sys

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm import create_model
from timm.models import save_for_hf
from timm.models.vision_transformer import VisionTransformer
from torch.utils._pytree import tree_leaves

from razorctl.config.job import OPTIMIZERS, Job
from razorctl.errors import DataError, MissingError, UsageError
from razorctl.memory.fake import fake
from razorctl.memory.job_forward import JobForward
from razorctl.memory.saved import traced_bytes
from razorctl.models import find, models, named, transformers
from razorctl.models.timm.micro import VIT_MICRO, WEIGHTS
from tests import local_hub

LOADABLE = {
    "vit-micro": find("vit-micro"),
    **{name: named.of("classification") for name, named in local_hub.ENTRIES.items()},
}
IMAGES = [Image.new(mode, (8, 11), 100) for mode in ("L", "RGB", "RGBA", "P")]
ROWS = {
    "image": {"image": IMAGES, "label": [0, 1, 2, 6]},
    "text": {"text": ["a cat", "", "dog " * 200, "sat"], "label": [0, 1, 2, 6]},
}


@pytest.fixture(params=LOADABLE)
def entry(request, hub):
    if request.param in local_hub.ENTRIES:
        local_hub.cache_model(hub, request.param)
    return LOADABLE[request.param]


def seed_everything(seed):
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def stack(inputs):
    return torch.utils.data.default_collate(inputs)


def shapes(batch):
    batch = batch if isinstance(batch, dict) else {"": batch}
    return {name: (t.shape, t.dtype) for name, t in batch.items()}


def test_feeds_and_trains(entry):
    model = entry.build(7).train()
    transform = pickle.loads(pickle.dumps(entry.transform(model)))  # as loading processes get it
    rows = transform(ROWS[entry.modality])
    assert rows["labels"] == [0, 1, 2, 6]
    inputs = stack(rows["inputs"])
    assert shapes(entry.example(model, 4)) == shapes(inputs)
    logits = entry.logits(model, inputs)
    assert logits.shape == (4, 7)
    logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_folder_of_timm_whose_config_names_no_classifier(tmp_path):
    stock = create_model("test_vit", num_classes=7)
    save_for_hf(stock, tmp_path, safe_serialization=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["pretrained_cfg"]["classifier"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = find(str(tmp_path)).build(3)
    assert model.head.out_features == 3
    assert torch.equal(model.patch_embed.proj.weight, stock.patch_embed.proj.weight)


# Run where razorctl cannot be imported: loads each folder by its own library alone.
STOCK = """
import json, sys
sys.modules["razorctl"] = None
import timm, torch
from timm.data import create_transform, resolve_model_data_config
from transformers import AutoModelForSequenceClassification, AutoTokenizer

for folder, size in json.loads(sys.argv[1]).items():
    config = json.load(open(f"{folder}/config.json"))
    if "architecture" in config:
        model = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        inputs = torch.load(f"{folder}/inputs.pt")
        data = resolve_model_data_config(model)
        size = tuple(data["input_size"])  # which an older timm takes from its own presets
        assert timm.__version__ < "1.0.31" or size == tuple(inputs.shape[1:]), data
        create_transform(**data)
        logits, names = model(inputs), model.pretrained_cfg["label_names"]
    else:
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.model_max_length == size
        settings = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        texts = tokenizer(["a cat", "dog"], **settings)
        logits, names = model(**texts).logits, [model.config.id2label[i] for i in range(2)]
    assert names == ["cat", "dog"], names
    torch.testing.assert_close(logits, torch.load(f"{folder}/logits.pt"))
"""


def test_what_is_saved_loads_without_razorctl(hub, tmp_path):
    sizes = {"vit-micro": 28, "vit-b16": 32, "bert-base": 24}
    for name, entry in LOADABLE.items():
        if name in local_hub.ENTRIES:
            local_hub.cache_model(hub, name)
        folder, size = tmp_path / name, None if name == "vit-micro" else sizes[name]
        model = entry.build(2, size).eval()
        entry.save(model, ("cat", "dog"), size, folder)
        if entry.modality == "image":
            inputs = torch.randn_like(entry.example(model, 2, size))
            torch.save(inputs, folder / "inputs.pt")
        else:
            rows = {"text": ["a cat", "dog"], "label": [0, 1]}
            inputs = stack(entry.transform(model, size)(rows)["inputs"])
        with torch.no_grad():
            logits = entry.logits(model, inputs)
            loaded, transform = entry.load(folder, size)
            assert torch.equal(entry.logits(loaded.eval(), inputs), logits)
        torch.save(logits, folder / "logits.pt")
        rows = {key: value for key, value in ROWS[entry.modality].items() if key != "label"}
        prepared = stack(transform(rows)["inputs"])
        known = stack(entry.transform(model, size)(ROWS[entry.modality])["inputs"])
        torch.testing.assert_close(prepared, known, rtol=0, atol=0)
    folders = {str(tmp_path / name): size for name, size in sizes.items()}
    command = [sys.executable, "-c", STOCK, json.dumps(folders)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("augment", ["crop", "rand"])
@pytest.mark.parametrize("name", ["vit-micro", "vit-b16"])
def test_augmented_images_differ_and_can_be_repeated(name, augment):
    entry = LOADABLE[name]
    model, size = entry.bare(7), None if name == "vit-micro" else 32
    plain = entry.transform(model, size)
    changed = pickle.loads(pickle.dumps(entry.augmented(model, size, augment)))
    noise = torch.randint(256, (40, 40, 3), dtype=torch.uint8)
    rows = {"image": [Image.fromarray(noise.numpy())] * 12, "label": [0] * 12}

    def take(transform):
        seed_everything(3)
        return torch.stack(transform(rows)["inputs"])

    assert take(changed).shape == take(plain).shape
    assert torch.equal(take(changed), take(changed))
    assert len({image.numpy().tobytes() for image in take(changed)}) == 12
    assert len({image.numpy().tobytes() for image in take(plain)}) == 1


def test_bare_is_the_same_with_fresh_weights(entry):
    pretrained, bare = entry.build(7), entry.bare(7)
    assert type(pretrained) is type(bare)
    described = [
        {n: (p.shape, p.dtype) for n, p in m.named_parameters()} for m in (pretrained, bare)
    ]
    assert described[0] == described[1]
    assert shapes(entry.example(pretrained, 3)) == shapes(entry.example(bare, 3))
    weights = dict(bare.named_parameters())
    same = [n for n, p in pretrained.named_parameters() if torch.equal(p, weights[n])]
    assert all("bias" in name or "norm" in name.lower() for name in same), same


# Of the code of a smaller one, whose trace is not repeated.
LARGER = ("vit-l16", "vit-g14", "llama-3.2-3b", "llama-3.1-8b")
LARGER += ("qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b")
LARGER += ("smollm2-135m", "rt-detr-r50")  # of more layers than llama-3.2-1b and rt-detr-r18


@pytest.mark.parametrize("name", models())
def test_every_entry_can_be_planned_without_a_file(name, hub):
    entry = find(name)
    assert entry.name == name
    assert entry.summary
    with torch.device("meta"):
        model = entry.bare(7)
    if entry.task != "detection":  # its trace needs a mode of its own
        fake(model)
    one, two = (tree_leaves(entry.example(model, size)) for size in (2, 4))
    assert [(2 * len(x), *x.shape[1:]) for x in one] == [x.shape for x in two]
    if name not in LARGER:
        batch, forward = entry.example(model, 2), None  # some norms need two
        if entry.task == "detection":
            job = Job(name, "digits", task=entry.task)
            batch, forward = entry.batch(model, 2, None, 7), JobForward(entry, job, 7).loss
        assert traced_bytes(model, batch, forward=forward) > 0
    rates = [dict(entry.defaults.get(optimizer, {})) for optimizer in OPTIMIZERS]
    own = {field: v for field, v in entry.defaults.items() if field not in OPTIMIZERS}
    assert not {"learning_rate", "weight_decay"} & set(own)  # no rate suits every optimizer
    for by_optimizer in rates:
        Job(name, "digits", **own, **by_optimizer)


def test_weights_that_no_library_has_are_missing():
    with pytest.raises(MissingError, match="no library has pretrained weights of proxylessnas"):
        find("proxylessnas").build(7)


@pytest.mark.parametrize("name", sorted(set(models()) - {"vit-micro", "proxylessnas"}))
def test_what_is_not_cached_is_missing(name, hub):
    sentence = f"{name} is not in the local cache and (the hub|its server) cannot be reached; run "
    with pytest.raises(MissingError, match=sentence):
        find(name).build(7)


@pytest.mark.parametrize("name", local_hub.ENTRIES)
def test_a_damaged_file_is_named(name, hub):
    folder = local_hub.cache_model(hub, name)
    weights = next(folder.glob("snapshots/*/model.safetensors")).resolve()
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(DataError, match=rf"{name} cannot be read \(.*\); delete .*/models--"):
        LOADABLE[name].build(7)
    weights.unlink()
    with pytest.raises(MissingError, match=name):
        LOADABLE[name].build(7)


def test_weights_that_lack_some_are_no_bert(hub, capsys):
    folder = local_hub.cache_model(hub, "bert-base")
    weights = next(folder.glob("snapshots/*/model.safetensors")).resolve()
    some = {name: w for name, w in load_file(weights).items() if "layer.1" not in name}
    save_file(some, weights, {"format": "pt"})
    capsys.readouterr()
    with pytest.raises(DataError, match=r"\(bert.encoder.layer.1.* is not among its weights\)"):
        LOADABLE["bert-base"].build(7)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("vit-micro", 30, "vit-micro takes images of 28 x 28 pixels, not 30"),
        ("vit-b16", 100, "patches of 16 pixels, and 100 is not a multiple of that; use 112"),
        ("bert-base", 513, "texts of up to 512 tokens, not 513"),
    ],
)
def test_an_input_size_that_does_not_fit_is_refused(name, size, message, hub):
    for make in (find(name).bare, find(name).build):
        with pytest.raises(UsageError, match=message):
            make(7, size)


@pytest.mark.parametrize(("name", "size"), [("vit-micro", 28), ("vit-b16", 48), ("bert-base", 16)])
def test_another_input_size(name, size, hub):
    entry = LOADABLE[name]
    if name in local_hub.ENTRIES:
        local_hub.cache_model(hub, name)
    for model in (entry.bare(7, size), entry.build(7, size)):
        inputs = stack(entry.transform(model, size)(ROWS[entry.modality])["inputs"])
        assert shapes(inputs) == shapes(entry.example(model, 4, size))
        assert all(shape[-1] == size for shape, _ in shapes(inputs).values())
        assert entry.logits(model, inputs).shape == (4, 7)


def test_bert_takes_pairs(hub):
    local_hub.cache_model(hub, "bert-base")
    entry = LOADABLE["bert-base"]
    rows = {"text": ["a cat"] * 2, "text_pair": ["sat", "a dog"], "label": [0, 1]}
    inputs = stack(entry.transform(entry.build(2), 8)(rows)["inputs"])
    assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1, 0]]
    assert inputs["attention_mask"].sum(1).tolist() == [6, 7]


@pytest.mark.parametrize(
    ("words", "size", "tokens"), [([1, 4], None, 8), ([7, 2, 1], 64, 16), ([30], 20, 20)]
)
def test_a_batch_of_texts_is_as_long_as_its_longest(words, size, tokens, hub):
    local_hub.cache_model(hub, "bert-base")
    entry = LOADABLE["bert-base"]
    model = entry.build(2, size).eval()
    rows = {"text": ["cat " * n for n in words], "label": [n % 2 for n in words]}
    found = []
    for few in ((), [(len(words), entry.longest(size))]):
        inputs = stack(entry.transform(model, size, few)(rows)["inputs"])
        torch.nn.functional.cross_entropy(
            entry.logits(model, inputs), torch.tensor(rows["label"])
        ).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        found.append((inputs, entry.logits(model, inputs), grads))
    (short, logits, grads), (full, *reference) = found
    assert {tuple(t.shape) for t in short.values()} == {(len(words), tokens)}
    assert shapes(full) == shapes(entry.example(model, len(words), size))
    torch.testing.assert_close([logits, grads], reference, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "tokens"), [("bert", 20), ("gpt2", 20), ("roberta", 18), ("mpnet", 18)]
)
def test_a_text_is_no_longer_than_a_model_takes(kind, tokens):
    """With 20 positions, those of RoBERTa and its kin begin after that of padding."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": kind, **sizes, "max_position_embeddings": 20, "pad_token_id": 1}
    entry = transformers.from_hub("short", "", "", config).of("classification")
    model = entry.bare(2)
    inputs = entry.example(model, 2, None)
    assert inputs["input_ids"].shape == (2, tokens)
    inputs["input_ids"] += 5
    assert entry.logits(model, inputs | {"attention_mask": None}).shape == (2, 2)
    with pytest.raises(UsageError, match=f"up to {tokens} tokens, not {tokens + 1}; use at most"):
        entry.bare(2, tokens + 1)
    longer = {name: torch.cat([each, each[:, :1]], 1) for name, each in inputs.items()}
    with pytest.raises((IndexError, RuntimeError)):
        entry.logits(model, longer)


@pytest.mark.parametrize(("task", "tokens"), [("classification", 128), ("masked-lm", 160)])
def test_the_tokenizer_of_a_folder_cuts_texts_as_training_did(task, tokens, hub, tmp_path):
    local_hub.cache_model(hub, "bert-base")
    entry = local_hub.ENTRIES["bert-base"].of(task)
    entry.save(entry.bare(2), (), None, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == tokens


def test_a_tokenizer_that_cannot_pad_is_refused(hub):
    folder = local_hub.cache_model(hub, "bert-base")
    settings = next(folder.glob("snapshots/*/tokenizer_config.json")).resolve()
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "pad_token": None}))
    entry = LOADABLE["bert-base"]
    with pytest.raises(DataError, match="the tokenizer of bert-base has no padding token; choose"):
        entry.transform(entry.bare(2), None)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("vit-mikro", "unknown model 'vit-mikro'; did you mean 'vit-micro'?"),
        ("resnet-18", "unknown model 'resnet-18'; did you mean 'resnet18'?"),
        ("VIT-base-patch16-224", "did you mean 'vit_base_patch16_224'?"),
        ("vitb16", "did you mean 'vit-b16'?"),
        ("timm:vit_base_patch16_225", "did you mean 'vit_base_patch16_224'?"),
        ("./runs/gone", "./runs/gone does not exist; name a folder that does, or a model."),
    ],
)
def test_unknown_models_of_libraries(name, sentence):
    with pytest.raises(UsageError) as caught:
        find(name)
    assert str(caught.value).endswith(sentence)


def test_of_a_library_with_many_ten_names_are_listed():
    with pytest.raises(UsageError) as caught:
        find("timm:nosuch")
    assert str(caught.value).count(", ") == 9
    assert len(str(caught.value)) < 300


def test_vit_micro_weights_are_those_that_the_record_describes():
    record = json.loads((WEIGHTS.parent / "pretraining.json").read_text())
    weights = WEIGHTS.read_bytes()
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
    assert model.blocks[0].attn.qkv.weight.std() > 0.02  # not timm's initialization


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("resnet18", "timm:resnet18"),
        ("vit_base_patch16_224.augreg_in21k", "timm:vit_base_patch16_224.augreg_in21k"),
        ("deeplabv3_resnet101", "torchvision:deeplabv3_resnet101"),
        ("vit_base_patch16_224", "timm:vit_base_patch16_224"),
    ],
)
def test_a_prefix_may_be_left_out(name, full):
    assert named(name).name == full


def test_a_name_on_the_hub_needs_no_prefix(monkeypatch):
    monkeypatch.setattr(transformers, "_described", lambda checkpoint, _: checkpoint.name)
    assert named("google/vit-base-patch16-224") == "hf:google/vit-base-patch16-224"
    for path in ("./folder/model", "a/b/c"):
        with pytest.raises(UsageError, match="does not exist; name a folder that does"):
            named(path)
