"""Vision models built by timm: registered ones, any by name, and models in local folders."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from razorctl import registry
from razorctl.config.tasks import OF_ROWS, Task
from razorctl.models.model import Model, ModelEntry
from razorctl.models.timm.classification import TimmClassifier, in_folder
from razorctl.models.timm.micro import MICRO
from razorctl.models.timm.proxyless import PROXYLESS
from razorctl.models.timm.segmentation import OWN, Segmenter, continued
from razorctl.system import documents

PREFIX = "timm:"
# SGD as in Sheared Backpropagation, section 5.1. It has no AdamW; those values are usual ones.
VIT_DEFAULTS = {
    "batch_size": 128,
    "steps": 20_000,
    "evaluate_every": 1000,
    "augment": "crop",
    "sgd": {"learning_rate": 0.01},
    "adamw": {"learning_rate": 1e-4, "weight_decay": 0.05},
}


def entry_of(name: str, summary: str, defaults: Mapping[str, Any], **fields: Any) -> ModelEntry:
    """The entry of an architecture. fields: others of `TimmClassifier`."""

    def model(task: Task) -> Model:
        kind = Segmenter if task == "segmentation" else TimmClassifier
        return kind(name=name, summary=summary, task=task, defaults=defaults, **fields)

    return ModelEntry(name, summary, "image", (*OF_ROWS, "segmentation"), model)


def from_hub(name: str, summary: str, timm_name: str, defaults: Mapping[str, Any]) -> ModelEntry:
    """The entry of an architecture whose weights are on the hub."""
    return entry_of(name, f"{summary}; from the hub", defaults, timm_name=timm_name)


def named(name: str) -> ModelEntry:
    """The entry of `timm:NAME`; raises UsageError, with the nearest name, if there is none."""
    from timm import is_model, list_models

    timm_name = name.removeprefix(PREFIX)
    if not is_model(timm_name.split(".")[0]):
        raise registry.unknown("model of timm", timm_name, list_models())
    return from_hub(name, timm_name, timm_name, {})


def knows(name: str) -> bool:
    """Whether timm has a model of that name."""
    if not re.fullmatch(r"[a-z0-9_]+(\.\w+)?", name):
        return False  # without importing timm
    from timm import is_model

    return bool(is_model(name.split(".")[0]))


def owns(config: Mapping[str, Any]) -> bool:
    """Whether a folder with this config.json has a timm model, or a razorctl head on one."""
    return "architecture" in config and ("library" not in config or OWN.items() <= config.items())


def origin(folder: Path) -> tuple[str | None, str | None]:
    """The repository of a folder's initial weights, and their license, according to its config.

    None for each that the config does not tell.
    """
    from timm.models import get_pretrained_cfg

    config = documents.parse(documents.read_bytes(folder / "config.json"))
    pretrained = config.get("pretrained_cfg") or {}
    tag = pretrained.get("tag")
    entry: Any = get_pretrained_cfg(f"{config['architecture']}.{tag}") if tag else None
    return entry and entry.hf_hub_id, pretrained.get("license")


def local(name: str, folder: Path, config: Mapping[str, Any]) -> ModelEntry:
    """The entry of a local folder; raises DataError if timm cannot build its model."""
    if "library" in config:
        return ModelEntry.single(continued(name, folder, config))
    return entry_of(name, f"a model of timm in {folder}", {}, **in_folder(folder, config))


MODELS = (
    ModelEntry.single(MICRO),
    from_hub(
        "vit-b16",
        "ViT-B/16, 224 px, pretrained on ImageNet-21k",
        "vit_base_patch16_224.augreg_in21k",
        VIT_DEFAULTS,
    ),
    from_hub(
        "vit-l16",
        "ViT-L/16, 224 px, pretrained on ImageNet-21k",
        "vit_large_patch16_224.augreg_in21k",
        {**VIT_DEFAULTS, "adamw": {"learning_rate": 5e-5, "weight_decay": 0.05}},
    ),
    from_hub(
        "dinov2-s",
        "DINOv2 ViT-S/14, 518 px",
        "vit_small_patch14_dinov2.lvd142m",
        {**VIT_DEFAULTS, "batch_size": 64},
    ),
    from_hub(
        "vit-g14",
        "DINOv2 ViT-g/14, 1.1 B parameters, 518 px",
        "vit_giant_patch14_dinov2.lvd142m",
        {**VIT_DEFAULTS, "batch_size": 32},
    ),
    from_hub(
        "swin-t",
        "Swin-T, 224 px, ImageNet-1k",
        "swin_tiny_patch4_window7_224.ms_in1k",
        VIT_DEFAULTS,
    ),
    from_hub(
        "convnext-t",
        "ConvNeXt-T, 224 px, ImageNet-12k and 1k",
        "convnext_tiny.in12k_ft_in1k",
        VIT_DEFAULTS,
    ),
    from_hub("resnet50", "ResNet-50, 224 px, ImageNet-1k", "resnet50.a1_in1k", VIT_DEFAULTS),
    from_hub(
        "mobilenetv2", "MobileNetV2, 224 px, ImageNet-1k", "mobilenetv2_100.ra_in1k", VIT_DEFAULTS
    ),
    ModelEntry.single(PROXYLESS),
)
