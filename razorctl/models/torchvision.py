"""Vision models of torchvision: any by name, for classification and for segmentation."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl import registry
from razorctl.config.tasks import OF_ROWS, Task
from razorctl.errors import MissingError, UsageError
from razorctl.models import Model, ModelEntry, Rows, images, masks
from razorctl.system import documents, hub

if TYPE_CHECKING:
    from torch import Tensor, nn

PREFIX = "torchvision:"
DEFAULTS = {
    "batch_size": 64,
    "steps": 5000,
    "sgd": {"learning_rate": 0.01},
    "adamw": {"learning_rate": 1e-4, "weight_decay": 0.05},
}
# Names in the weights of DenseNets have an extra dot, from an older naming of modules.
OLD_DENSENET = r"(denselayer\d+\.(?:norm|relu|conv))\.(\d\.)"
SIDE, WIDE_SIDE = 224, 520  # pixels, of a classifier and of a segmentation model


def _config(task: Task, input_size: int | None) -> dict[str, Any]:
    pixels = input_size or _side(task)
    crop = 1.0 if task == "segmentation" else 0.875
    return {
        "input_size": (3, pixels, pixels),
        "mean": images.MEAN,
        "std": images.STD,
        "interpolation": "bilinear",
        "crop_pct": crop,
    }


def _side(task: Task) -> int:
    return WIDE_SIDE if task == "segmentation" else SIDE


def _bare(architecture: str, task: Task, classes: int, _: int | None = None) -> "nn.Module":
    from torchvision.models import get_model

    options = {"weights_backbone": None, "aux_loss": False} if task == "segmentation" else {}
    model: nn.Module = get_model(architecture, weights=None, num_classes=classes, **options)
    return model


def _build(
    name: str, architecture: str, task: Task, classes: int, input_size: int | None = None
) -> "nn.Module":
    """The model with pretrained weights, except weights that depend on the number of classes."""
    import os
    from urllib.error import URLError

    import torch
    from torchvision.models import get_model_weights

    model = _bare(architecture, task, classes, input_size)
    url: str = get_model_weights(architecture).DEFAULT.url
    folder = Path(torch.hub.get_dir()) / "checkpoints"
    file = folder / url.rsplit("/", 1)[-1]
    try:
        if not file.exists():
            if os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "True"):
                raise URLError("offline")
            folder.mkdir(parents=True, exist_ok=True)
            checksum = file.stem.rsplit("-", 1)[-1]  # the first digits of its SHA-256
            torch.hub.download_url_to_file(url, str(file), checksum, progress=False)
    except URLError:
        raise MissingError(
            f"{name} is not in the local cache and its server cannot be reached; run once with a "
            "network, or point TORCH_HOME at a cache that has it."
        ) from None
    with hub.reading(name, file, f"delete {file} and run again"):
        return _fitted(model, torch.load(file, map_location="cpu", weights_only=True))


def _fitted(model: "nn.Module", weights: Mapping[str, "Tensor"]) -> "nn.Module":
    """The model with the weights that fit; a head of another size stays fresh.

    Raises ValueError for other weights that are missing or do not fit.
    """
    own = model.state_dict()
    weights = {re.sub(OLD_DENSENET, r"\1\2", name): weight for name, weight in weights.items()}
    for name, weight in own.items():
        there = weights.get(name)
        if there is None and not name.endswith("num_batches_tracked"):
            raise ValueError(f"{name} is not among its weights")
        if there is not None and there.shape[1:] != weight.shape[1:]:
            raise ValueError(f"{name} has another shape than its architecture says")
    fitting = {k: v for k, v in weights.items() if k in own and v.shape == own[k].shape}
    model.load_state_dict({**own, **fitting})
    return model


def _logits(model: "nn.Module", inputs: "Tensor") -> "Tensor":
    output: Any = model(inputs)
    if isinstance(output, Mapping):  # a segmentation model
        output = output["out"]
    logits: Tensor = getattr(output, "logits", output)  # some models return auxiliary logits too
    return logits


def _save(
    architecture: str,
    task: Task,
    model: "nn.Module",
    classes: Sequence[str],
    input_size: int | None,
    folder: Path,
) -> None:
    """Writes the weights, and the name and settings that `torchvision.models.get_model` takes."""
    from safetensors.torch import save_file

    config = {
        "library": "torchvision",
        "architecture": architecture,
        "task": task,
        "label_names": list(classes),
        "input_size": input_size or _side(task),
    }
    (folder / "config.json").write_text(documents.text(config, indent=2) + "\n")
    save_file(model.state_dict(), folder / "model.safetensors")


def _load(
    folder: Path, input_size: int | None = None
) -> tuple["nn.Module", Callable[[Rows], Rows]]:
    """The model and the transform of a folder that `Model.save` wrote."""
    from safetensors.torch import load_file

    config = documents.read_foreign(folder / "config.json")
    task, classes = config["task"], len(config["label_names"])
    model = _bare(config["architecture"], task, classes)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model, _inputs(task).transform(_config(task, input_size or config["input_size"]))


def _inputs(task: Task) -> Any:
    return masks if task == "segmentation" else images


def _model(
    name: str,
    architecture: str,
    build: Callable[[int, int | None], "nn.Module"],
    task: Task,
    summary: str,
) -> Model:
    def transform(_: "nn.Module", input_size: int | None = None) -> Callable[[Rows], Rows]:
        transform: Callable[[Rows], Rows] = _inputs(task).transform(_config(task, input_size))
        return transform

    def augmented(_: "nn.Module", input_size: int | None, augment: str) -> Callable[[Rows], Rows]:
        transform: Callable[[Rows], Rows] = _inputs(task).augmented(
            _config(task, input_size), augment
        )
        return transform

    def example(_: "nn.Module", batch_size: int, input_size: int | None = None) -> "Tensor":
        return images.example(_config(task, input_size), batch_size)

    return Model(
        name=name,
        summary=summary,
        modality="image",
        task=task,
        build=build,
        bare=partial(_bare, architecture, task),
        transform=transform,
        example=example,
        logits=_logits,
        save=partial(_save, architecture, task),
        load=_load,
        defaults=DEFAULTS,
        augmented=augmented,
    )


def _named(name: str, architecture: str, summary: str, task: Task) -> ModelEntry:
    build = partial(_build, name, architecture, task)
    return _entry(name, architecture, build, task, summary)


def _entry(
    name: str,
    architecture: str,
    build: Callable[[int, int | None], "nn.Module"],
    task: Task,
    summary: str,
) -> ModelEntry:
    """The entry of a model for segmentation, or for the tasks of a classifier."""
    model = partial(_model, name, architecture, build, summary=summary)
    tasks = OF_ROWS if task in OF_ROWS else (task,)
    return ModelEntry(name, summary, "image", tasks, model)


def named(name: str) -> ModelEntry:
    """The entry of `torchvision:NAME`, a classifier or a segmentation model.

    Raises UsageError with the nearest name for any other.
    """
    from torchvision import models

    architecture = name.removeprefix(PREFIX)
    kinds: dict[Task, list[str]] = {
        "classification": models.list_models(module=models),
        "segmentation": models.list_models(module=models.segmentation),
    }
    task = next((task for task, names in kinds.items() if architecture in names), None)
    if task is None:
        every = [known for names in kinds.values() for known in names]
        if architecture in models.list_models():
            raise UsageError(
                f"{name} is neither a classifier nor a segmentation model of images; choose one of "
                f"{', '.join(kinds['segmentation'])}, or a classifier."
            )
        raise registry.unknown("model of torchvision", architecture, every)
    return _named(name, architecture, f"{architecture} of torchvision", task)


def knows(name: str) -> bool:
    """Whether torchvision has a model of that name."""
    if not re.fullmatch(r"[a-z0-9_]+", name):
        return False  # without importing torchvision
    from torchvision import models

    return name in models.list_models()


def owns(config: Mapping[str, Any]) -> bool:
    """Whether a folder with that config.json has a model of torchvision."""
    return config.get("library") == "torchvision"


def local(name: str, folder: Path, config: Mapping[str, Any]) -> ModelEntry:
    """The entry of a local folder that a run wrote."""
    from safetensors.torch import load_file

    architecture, task = config["architecture"], config["task"]

    def build(classes: int, input_size: int | None = None) -> "nn.Module":
        model = _bare(architecture, task, classes, input_size)
        with hub.reading(name, folder, "name another folder"):
            return _fitted(model, load_file(folder / "model.safetensors"))

    entry = _entry(name, architecture, build, task, f"{architecture} in {folder}")
    files = [folder / "config.json", folder / "model.safetensors"]
    return replace(entry, of=lambda task: replace(entry.of(task), files=lambda _: files))


MODELS = (
    _named(
        "deeplabv3-resnet50",
        "deeplabv3_resnet50",
        "DeepLabV3 with ResNet-50, 520 px, COCO; from torchvision's server",
        "segmentation",
    ),
)
