"""Pretrain vit-micro on Fashion-MNIST: the weights that ship in razorctl/models/vit_micro/.

Writes model.safetensors (half precision, without the classifier) and pretraining.json (how it
was made and what it reached). Fashion-MNIST comes from Debian's package dataset-fashion-mnist,
fetched with apt-get and checked against the SHA-256 below.

    .venv/bin/python scripts/assets/pretrain_vit_micro.py
"""

import argparse
import gzip
import hashlib
import json
import math
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from razorctl.models.timm.micro import VIT_MICRO, vit_micro

PACKAGE = "dataset-fashion-mnist"
PACKAGE_SHA256 = "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0"
OUT = Path(__file__).parents[2] / "razorctl" / "models" / "vit_micro"


def fetch(folder: Path) -> Path:
    """Downloads and unpacks the Debian package; returns the folder with its four IDX files."""
    subprocess.run(["apt-get", "download", "-q", PACKAGE], cwd=folder, check=True)
    (package,) = folder.glob("*.deb")
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    if digest != PACKAGE_SHA256:
        raise SystemExit(f"{package.name} has SHA-256 {digest}, expected {PACKAGE_SHA256}")
    subprocess.run(["dpkg", "-x", package, folder], check=True)
    return folder / "usr/share/datasets/fashion-mnist"


def read(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images [n, 1, 28, 28] in -1..1 and labels [n] of one split (`train` or `t10k`)."""
    pixels = gzip.decompress((folder / f"{split}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((folder / f"{split}-labels-idx1-ubyte.gz").read_bytes())[8:]
    images = torch.from_numpy(np.frombuffer(pixels, np.uint8).copy()).view(-1, 1, 28, 28)
    return images / 127.5 - 1, torch.from_numpy(np.frombuffer(labels, np.uint8).astype(np.int64))


def augment(x: Tensor) -> Tensor:
    """Random affine map and mirroring per image; in half of the batches a lower resolution."""
    n = len(x)
    angle = torch.empty(n).uniform_(-0.2, 0.2)
    scale = torch.empty(n, 2).uniform_(0.85, 1.15)
    shear = torch.empty(n).uniform_(-0.15, 0.15)
    mirror = torch.randint(0, 2, (n,)) * 2 - 1
    cos, sin = angle.cos(), angle.sin()
    rows = [
        torch.stack([cos * scale[:, 0] * mirror, -sin + shear, torch.empty(n).uniform_(-0.1, 0.1)]),
        torch.stack([sin, cos * scale[:, 1], torch.empty(n).uniform_(-0.1, 0.1)]),
    ]
    theta = torch.stack(rows).permute(2, 0, 1)
    x = F.grid_sample(x, F.affine_grid(theta, list(x.shape), False), "bilinear", "border", False)
    if torch.rand(()) < 0.5:
        # Small targets such as 8 x 8 digits arrive blurred, so the backbone must have seen blur.
        side = int(torch.randint(8, 28, ()))
        x = F.interpolate(F.interpolate(x, side, mode="area"), 28, mode="bicubic").clamp(-1, 1)
    return x


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    hits = sum(
        int((model(x).argmax(1) == y).sum())
        for x, y in zip(images.split(500), labels.split(500), strict=True)
    )
    model.train()
    return hits / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as tmp:
        folder = fetch(Path(tmp))
        train, test = read(folder, "train"), read(folder, "t10k")
    model = vit_micro(num_classes=10, pretrained=False).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    per_epoch = len(train[0]) // args.batch_size
    steps = args.epochs * per_epoch
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / 400, 0.5 + 0.5 * math.cos(math.pi * i / steps))
    )
    start = time.monotonic()
    for epoch in range(args.epochs):
        for batch in torch.randperm(len(train[0]))[: per_epoch * args.batch_size].split(
            args.batch_size
        ):
            loss = F.cross_entropy(
                model(augment(train[0][batch])), train[1][batch], label_smoothing=0.1
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        score = accuracy(model, *test)
        print(
            f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {score:.4f}, "
            f"{time.monotonic() - start:.0f} s",
            flush=True,
        )

    write(args, model, steps, score)


def write(args: argparse.Namespace, model: torch.nn.Module, steps: int, score: float) -> None:
    """Writes the backbone in half precision, and how it was made."""
    args.out.mkdir(parents=True, exist_ok=True)
    backbone = {
        k: v.half().contiguous() for k, v in model.state_dict().items() if not k.startswith("head.")
    }
    save_file(backbone, args.out / "model.safetensors", metadata={"format": "pt"})
    record = {
        "architecture": {"class": "timm.models.vision_transformer.VisionTransformer", **VIT_MICRO},
        "data": {
            "name": "Fashion-MNIST",
            "debian_package": PACKAGE,
            "sha256": PACKAGE_SHA256,
            "license": "MIT",
        },
        "seed": args.seed,
        "steps": steps,
        "epochs": args.epochs,
        "batch_size": args.batch_size,
        "optimizer": {"name": "AdamW", "lr": args.lr, "weight_decay": 0.05, "label_smoothing": 0.1},
        "test_accuracy": score,
        "sha256": hashlib.sha256((args.out / "model.safetensors").read_bytes()).hexdigest(),
        "versions": {"torch": torch.__version__, "timm": timm.__version__},
    }
    (args.out / "pretraining.json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
