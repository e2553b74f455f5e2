"""Semantic segmentation: a backbone of timm with a linear layer on its last features."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.errors import UsageError
from razorctl.models import Model, Rows, images, masks
from razorctl.models.timm.classification import Architecture, in_folder, logits
from razorctl.system import documents, hub

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger("razorctl.models")

HEAD = "classifier.weight"
OWN = {"library": "razorctl", "head": "linear"}  # in the config of a folder with such a model


def _built(
    architecture: Architecture, pretrained: bool, classes: int, input_size: int | None = None
) -> "nn.Module":
    from timm.data import resolve_data_config

    from razorctl.models.timm.linear_segmenter import LinearSegmenter

    backbone = architecture.create(pretrained, input_size, features_only=True, out_indices=(-1,))
    config = resolve_data_config(pretrained_cfg=architecture.config)
    return LinearSegmenter(backbone, classes, images.resized(config, input_size))


def _continued(
    architecture: Architecture, weights: bool, classes: int, input_size: int | None = None
) -> "nn.Module":
    """The model in the folder of an architecture; with another number of classes, a fresh head."""
    from safetensors.torch import load_file

    from razorctl.models.timm.linear_segmenter import LinearSegmenter

    folder = architecture.folder
    assert folder is not None
    with hub.reading(architecture.name, folder, "name another folder"):
        config = documents.read_foreign(folder / "config.json")
        plain, side = replace(architecture, folder=None), config["data_config"]["input_size"][1]
        if input_size not in (None, side) and plain.settings(input_size):
            raise UsageError(
                f"{architecture.name} takes images of {side} pixels alone; leave the input size "
                "out."
            )
        backbone = plain.create(
            False, input_size, features_only=True, out_indices=(-1,), **architecture.args
        )
        model = LinearSegmenter(
            backbone, classes, images.resized(config["data_config"], input_size)
        )
        if weights:
            own = model.state_dict()
            stored = load_file(folder / "model.safetensors")
            if len(stored[HEAD]) != classes:
                stored |= {name: own[name] for name in own if name.startswith("classifier.")}
                log.warning(
                    "the classifier of %s is new; it is trained from random weights",
                    architecture.name,
                )
            model.load_state_dict(stored)
    return model


def example(model: "nn.Module", batch_size: int, input_size: int | None = None) -> "Tensor":
    config: Any = model.data_config
    return images.example(images.resized(config, input_size), batch_size)


def transform(model: "nn.Module", input_size: int | None = None) -> Callable[[Rows], Rows]:
    """A function from rows with images and masks to rows with tensors of one size."""
    config: Any = model.data_config
    return masks.transform(images.resized(config, input_size))


def augmented(model: "nn.Module", input_size: int | None, augment: str) -> Callable[[Rows], Rows]:
    config: Any = model.data_config
    return masks.augmented(images.resized(config, input_size), augment)


def save(
    architecture: Architecture,
    model: "nn.Module",
    classes: Sequence[str],
    input_size: int | None,
    folder: Path,
) -> None:
    """Writes the weights, and a config for building the model."""
    from safetensors.torch import save_file

    config = {
        **OWN,
        "architecture": architecture.timm_name,
        "model_args": {**architecture.args, **architecture.settings(input_size)},
        "label_names": list(classes),
        "data_config": model.data_config,
    }
    (folder / "config.json").write_text(documents.text(config, indent=2) + "\n")
    save_file(model.state_dict(), folder / "model.safetensors")


def load(folder: Path, input_size: int | None = None) -> tuple["nn.Module", Callable[[Rows], Rows]]:
    """The model and the transform that `save` wrote."""
    config = documents.read_foreign(folder / "config.json")
    architecture = in_folder(str(folder), folder, config)
    model = _continued(architecture, True, len(config["label_names"]))
    return model, transform(model, input_size)


def segmenter(
    architecture: Architecture,
    summary: str,
    defaults: Mapping[str, Any],
    built: Callable[..., "nn.Module"] = _built,
) -> Model:
    """A linear head on the last features of an architecture with a pretrained backbone."""
    return Model(
        name=architecture.name,
        summary=summary,
        modality="image",
        task="segmentation",
        build=partial(built, architecture, True),
        bare=partial(built, architecture, False),
        transform=transform,
        example=example,
        logits=logits,
        save=partial(save, architecture),
        load=load,
        defaults=defaults,
        augmented=augmented,
    )


def continued(name: str, folder: Path, config: Mapping[str, Any]) -> Model:
    """The model in a folder that `save` wrote."""
    architecture = in_folder(name, folder, config)
    model = segmenter(architecture, f"a segmentation model in {folder}", {}, _continued)
    return replace(model, files=architecture.files)
