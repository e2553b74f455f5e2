"""Small repositories in the layout of the hub's cache, for tests without network."""

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pyarrow.parquet
from datasets import ClassLabel, Dataset, Features, Image, Value
from PIL import Image as Pictures
from safetensors.torch import load_file, save_file
from timm import create_model
from transformers import BertConfig, BertForPreTraining, BertTokenizer

from razorctl.data import Source
from razorctl.models import timm, transformers

COMMIT = "0123456789abcdef0123456789abcdef01234567"
VIT = "vit_tiny_patch16_224.augreg_in21k"
BERT = {
    "model_type": "bert",
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 160,
    "type_vocab_size": 2,
}
ENTRIES = {
    "vit-b16": timm.from_hub("vit-b16", "small", VIT, timm.VIT_DEFAULTS),
    "bert-base": transformers.from_hub("bert-base", "small", "razorctl/bert", BERT),
}


def cache(hub: Path, kind: str, repo: str, write: Callable[[Path], object]) -> Path:
    """Caches a repository whose files `write` puts into a folder; returns its own folder."""
    folder = hub / f"{kind}s--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    write(snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "blobs").mkdir()
    for file in [path for path in snapshot.rglob("*") if path.is_file()]:
        blob = folder / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        file.replace(blob)
        file.symlink_to(blob)
    return folder


def vit(snapshot: Path) -> None:
    save_file(create_model(VIT).state_dict(), snapshot / "model.safetensors")


def bert(snapshot: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "sat", "dog"]
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(snapshot)
    BertForPreTraining(
        BertConfig(**{k: v for k, v in BERT.items() if k != "model_type"})
    ).save_pretrained(snapshot)
    # As old as the released weights are, they call a norm's parameters gamma and beta.
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    weights = load_file(snapshot / "model.safetensors")
    for new in [name for name in weights if name.endswith(tuple(old))]:
        stem, ending = new.rsplit("LayerNorm", 1)
        weights[stem + old["LayerNorm" + ending]] = weights.pop(new)
    save_file(weights, snapshot / "model.safetensors", {"format": "pt"})


def cache_model(hub: Path, name: str) -> Path:
    """Caches what the entry of that name in ENTRIES loads."""
    if name == "vit-b16":
        return cache(hub, "model", f"timm/{VIT}", vit)
    return cache(hub, "model", "razorctl/bert", bert)


def rows(source: Source, count: int) -> Dataset:
    """The files of a data set's repository; all classes have names, but few have examples."""
    columns: Mapping[str, str] = repository(source)["columns"]
    values = {
        "image": [Pictures.new("RGB", (9, 7), (i, 2 * i, 50)) for i in range(count)],
        "text": ["a cat sat"] * count,
        "text_pair": ["a dog sat " * i for i in range(count)],
        "label": [i % source.classes for i in range(count)],
    }
    kinds = {
        "image": Image(),
        "text": Value("string"),
        "text_pair": Value("string"),
        "label": ClassLabel(names=[f"class {i}" for i in range(source.classes)]),
    }
    own = {theirs: kinds[ours] for theirs, ours in columns.items()} | {"more": Value("int64")}
    data = {theirs: values[ours] for theirs, ours in columns.items()} | {"more": [0] * count}
    return Dataset.from_dict(data, Features(own))


def repository(source: Source) -> dict:
    """Where a data set of the hub comes from: the arguments of razorctl.data.hub.load."""
    load = source.load
    assert isinstance(load, partial)
    names = ("name", "repo", "train", "test", "columns", "classes", "task")
    return dict(zip(names, load.args, strict=True))


def cache_data(
    hub: Path, source: Source, count: int = 8, edit: Callable[[Dataset], Dataset] = lambda d: d
) -> Path:
    """Caches `count` rows a file of a data set, through `edit`."""
    origin = repository(source)

    def write(snapshot: Path) -> None:
        for pattern in (*origin["train"], *origin["test"]):
            file = snapshot / pattern.replace("*", "00000-of-00001")
            file.parent.mkdir(exist_ok=True)
            edit(rows(source, count)).to_parquet(file)

    return cache(hub, "dataset", origin["repo"], write)


def strip(folder: Path) -> None:
    """Removes from Parquet files which columns are images and labels, as datasets writes it."""
    for file in folder.glob("blobs/*"):
        table = pyarrow.parquet.read_table(file)
        pyarrow.parquet.write_table(table.replace_schema_metadata(), file)
