"""Vision models of torchvision: any by name, for classification and for segmentation."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl import registry
from razorctl.config.tasks import Task
from razorctl.errors import MissingError, UsageError
from razorctl.models import images
from razorctl.models.image_model import ImageModel, write
from razorctl.models.model import ModelEntry, Size, Transform
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


def _built(architecture: str, task: Task, classes: int) -> "nn.Module":
    from torchvision.models import get_model

    options = {"weights_backbone": None, "aux_loss": False} if task == "segmentation" else {}
    model: nn.Module = get_model(architecture, weights=None, num_classes=classes, **options)
    return model


@dataclass(frozen=True, kw_only=True)
class TorchvisionModel(ImageModel):
    """An architecture of torchvision. folder: the folder of a run with it; None for the server."""

    architecture: str
    folder: Path | None = None
    defaults: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)

    @property
    def side(self) -> int:
        """The usual pixels of an image's side."""
        return WIDE_SIDE if self.task == "segmentation" else SIDE

    def build(self, classes: int, input_size: Size = None, pretrained: bool = True) -> "nn.Module":
        import torch
        from safetensors.torch import load_file

        model = _built(self.architecture, self.task, classes)
        if not pretrained:
            return model
        if self.folder is not None:
            with hub.reading(self.name, self.folder, "name another folder"):
                return _fitted(model, load_file(self.folder / "model.safetensors"))
        file = self._downloaded()
        with hub.reading(self.name, file, f"delete {file} and run again"):
            return _fitted(model, torch.load(file, map_location="cpu", weights_only=True))

    def files(self, weights: bool) -> Sequence[Path]:
        names = ("config.json", "model.safetensors")
        return [] if self.folder is None else [self.folder / name for name in names]

    def _downloaded(self) -> Path:
        """The file of the weights; raises MissingError if it is neither here nor on the server."""
        import os
        from urllib.error import URLError

        import torch
        from torchvision.models import get_model_weights

        url: str = get_model_weights(self.architecture).DEFAULT.url
        file = Path(torch.hub.get_dir()) / "checkpoints" / url.rsplit("/", 1)[-1]
        try:
            if not file.exists():
                if os.environ.get("HF_HUB_OFFLINE") in ("1", "true", "True"):
                    raise URLError("offline")
                file.parent.mkdir(parents=True, exist_ok=True)
                checksum = file.stem.rsplit("-", 1)[-1]  # the first digits of its SHA-256
                torch.hub.download_url_to_file(url, str(file), checksum, progress=False)
        except URLError:
            raise MissingError(
                f"{self.name} is not in the local cache and its server cannot be reached; run once "
                "with a network, or point TORCH_HOME at a cache that has it."
            ) from None
        return file

    def data_config(self, model: "nn.Module", input_size: Size) -> dict[str, Any]:
        pixels = input_size or self.side
        return {
            "input_size": (3, pixels, pixels),
            "mean": images.MEAN,
            "std": images.STD,
            "interpolation": "bilinear",
            "crop_pct": 1.0 if self.task == "segmentation" else 0.875,
        }

    def logits(self, model: "nn.Module", inputs: "Tensor") -> "Tensor":
        output: Any = model(inputs)
        if isinstance(output, Mapping):  # a segmentation model
            output = output["out"]
        logits: Tensor = getattr(output, "logits", output)  # some return auxiliary logits too
        return logits

    def save(
        self, model: "nn.Module", classes: Sequence[str], input_size: Size, folder: Path
    ) -> None:
        """Writes the weights, and what `torchvision.models.get_model` takes."""
        config = {
            "library": "torchvision",
            "architecture": self.architecture,
            "task": self.task,
            "label_names": list(classes),
            "input_size": input_size or self.side,
        }
        write(model, config, folder)

    def load(self, folder: Path, input_size: Size = None) -> tuple["nn.Module", Transform]:
        from safetensors.torch import load_file

        config = documents.read_foreign(folder / "config.json")
        model = _built(config["architecture"], config["task"], len(config["label_names"]))
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model, self.transform(model, input_size or config["input_size"])


def _fitted(model: "nn.Module", weights: Mapping[str, "Tensor"]) -> "nn.Module":
    """The model with the weights that fit; a head of another size stays fresh.

    Raises ValueError for other weights that are missing or do not fit.
    """
    state = model.state_dict()
    weights = {re.sub(OLD_DENSENET, r"\1\2", name): weight for name, weight in weights.items()}
    for name, weight in state.items():
        there = weights.get(name)
        if there is None and not name.endswith("num_batches_tracked"):
            raise ValueError(f"{name} is not among its weights")
        if there is not None and there.shape[1:] != weight.shape[1:]:
            raise ValueError(f"{name} has another shape than its architecture says")
    fitting = {k: v for k, v in weights.items() if k in state and v.shape == state[k].shape}
    model.load_state_dict({**state, **fitting})
    return model


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
        every = [each for names in kinds.values() for each in names]
        if architecture in models.list_models():
            raise UsageError(
                f"{name} is neither a classifier nor a segmentation model of images; choose one of "
                f"{', '.join(kinds['segmentation'])}, or a classifier."
            )
        raise registry.unknown("model of torchvision", architecture, every)
    summary = f"{architecture} of torchvision"
    return ModelEntry.single(
        TorchvisionModel(name=name, summary=summary, task=task, architecture=architecture)
    )


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
    architecture = config["architecture"]
    return ModelEntry.single(
        TorchvisionModel(
            name=name,
            summary=f"{architecture} in {folder}",
            task=config["task"],
            architecture=architecture,
            folder=folder,
        )
    )


MODELS = (
    ModelEntry.single(
        TorchvisionModel(
            name="deeplabv3-resnet50",
            summary="DeepLabV3 with ResNet-50, 520 px, COCO; from torchvision's server",
            task="segmentation",
            architecture="deeplabv3_resnet50",
        )
    ),
)
