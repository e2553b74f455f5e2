"""Semantic segmentation: a backbone of timm with a linear layer on its last features."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.errors import UsageError
from razorctl.models import images
from razorctl.models.image_model import write
from razorctl.models.model import Model, Size, Transform
from razorctl.models.timm.classification import TimmClassifier, in_folder
from razorctl.system import documents, hub

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger("razorctl.models")

HEAD = "classifier.weight"
OWN = {"library": "razorctl", "head": "linear"}  # in the config of a folder with such a model


@dataclass(frozen=True, kw_only=True)
class Segmenter(TimmClassifier):
    """A linear head on the last features of an architecture with a pretrained backbone."""

    def build(self, classes: int, input_size: Size = None, pretrained: bool = True) -> "nn.Module":
        from timm.data import resolve_data_config

        config = resolve_data_config(pretrained_cfg=self.config)
        return self._headed(pretrained, classes, config, input_size)

    def _headed(
        self,
        pretrained: bool,
        classes: int,
        config: Mapping[str, Any],
        input_size: Size,
        **settings: Any,
    ) -> "nn.Module":
        from razorctl.models.timm.linear_segmenter import LinearSegmenter

        features = {"features_only": True, "out_indices": (-1,), **settings}
        backbone = self.create(pretrained, input_size, **features)
        return LinearSegmenter(backbone, classes, images.resized(config, input_size))

    def data_config(self, model: "nn.Module", input_size: Size) -> dict[str, Any]:
        config: Any = model.data_config
        return images.resized(config, input_size)

    def save(
        self, model: "nn.Module", classes: Sequence[str], input_size: Size, folder: Path
    ) -> None:
        """Writes the weights, and a config for building the model."""
        config = {
            **OWN,
            "architecture": self.timm_name,
            "model_args": {**self.args, **self.settings(input_size)},
            "label_names": list(classes),
            "data_config": model.data_config,
        }
        write(model, config, folder)

    def load(self, folder: Path, input_size: Size = None) -> tuple["nn.Module", Transform]:
        config = documents.read_foreign(folder / "config.json")
        model = continued(str(folder), folder, config).build(len(config["label_names"]))
        return model, self.transform(model, input_size)


@dataclass(frozen=True, kw_only=True)
class ContinuedSegmenter(Segmenter):
    """A model in a folder that `Segmenter.save` wrote."""

    @property
    def unproven(self) -> bool:
        return False

    def build(self, classes: int, input_size: Size = None, pretrained: bool = True) -> "nn.Module":
        """The model with its weights; with another number of classes, a fresh head."""
        from safetensors.torch import load_file

        folder = self.folder
        assert folder is not None
        with hub.reading(self.name, folder, "name another folder"):
            config = documents.read_foreign(folder / "config.json")["data_config"]
            plain, side = replace(self, folder=None), config["input_size"][1]
            if input_size not in (None, side) and plain.settings(input_size):
                raise UsageError(
                    f"{self.name} takes images of {side} pixels alone; leave the input size out."
                )
            model = plain._headed(False, classes, config, input_size, **self.args)
            if pretrained:
                fresh = model.state_dict()
                stored = load_file(folder / "model.safetensors")
                if len(stored[HEAD]) != classes:
                    head = (name for name in fresh if name.startswith("classifier."))
                    stored |= {name: fresh[name] for name in head}
                    log.warning(
                        "the classifier of %s is new; it is trained from random weights", self.name
                    )
                model.load_state_dict(stored)
        return model


def continued(name: str, folder: Path, config: Mapping[str, Any]) -> Model:
    """The model in a folder that `Segmenter.save` wrote."""
    summary, fields = f"a segmentation model in {folder}", in_folder(folder, config)
    return ContinuedSegmenter(name=name, summary=summary, task="segmentation", **fields)
