"""Image classifiers of timm."""

import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.errors import DataError, UsageError, lacks_memory, reason_of
from razorctl.models import images
from razorctl.models.image_model import ImageModel
from razorctl.models.model import Size, Transform
from razorctl.system import documents, hub

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TimmClassifier(ImageModel):
    """The classifier of an architecture of timm; only its last layer is fresh.

    Args:
        timm_name: timm's name, with the tag of the weights if it has several.
        folder: the local folder with the weights; None for the hub.
        args: arguments for building it with timm, besides the number of classes.
    """

    timm_name: str
    folder: Path | None = None
    args: Mapping[str, Any] = field(default_factory=dict)

    def build(self, classes: int, input_size: Size = None, pretrained: bool = True) -> "nn.Module":
        return self.create(pretrained, input_size, num_classes=classes)

    @property
    def unproven(self) -> bool:
        return self.folder is not None

    @property
    def source(self) -> str:
        """The name that `timm.create_model` takes."""
        return self.timm_name if self.folder is None else f"local-dir:{self.folder}"

    def settings(self, input_size: Size) -> dict[str, Any]:
        """The arguments of `create_model` for images of a size; raises UsageError if none fit."""
        from timm.models import get_pretrained_cfg

        config: Any = get_pretrained_cfg(self.timm_name)
        if input_size is None or not (config is None or config.fixed_input_size):
            return {}
        match = re.search(r"patch(\d+)", self.timm_name)
        side = int(self.args.get("patch_size", match[1] if match else 1))
        if input_size % side:
            raise UsageError(
                f"{self.name} splits images into patches of {side} pixels, and {input_size} is not "
                f"a multiple of that; use {-(-input_size // side) * side}."
            )
        return {"img_size": input_size}

    def create(self, pretrained: bool, input_size: Size, **wanted: Any) -> "nn.Module":
        """The model, with the pretrained weights or fresh ones.

        Raises MissingError or DataError if the weights are not available, and UsageError for a size
        that it cannot take.
        """
        wanted |= self.settings(input_size)
        if not pretrained:
            return self._created(input_size, **wanted)
        if self.folder is not None:
            with hub.reading(self.name, self.folder, "name another folder"):
                self._check_whole(wanted.get("num_classes"))
                wanted["pretrained_cfg_overlay"] = self._classifier()
                return self._created(input_size, pretrained=True, **wanted)
        (file,) = self.files(True)
        # The hub's file has timm's layout, even if the first release of the weights had another.
        wanted["pretrained_cfg_overlay"] = {"file": str(file), "custom_load": False}
        with hub.reading(self.name, file.parent):
            return self._created(input_size, pretrained=True, **wanted)

    def files(self, weights: bool) -> Sequence[Path]:
        """The files of the pretrained model that are read, with or without weights."""
        if self.folder is not None:
            of_weights = ("*model*.safetensors", "*model*.bin", "*model*.pth") if weights else ()
            patterns = ("config.json", *of_weights)
            return [file for each in patterns for file in sorted(self.folder.glob(each))]
        file = "model.safetensors"
        repo = f"timm/{self.tagged}"
        return [hub.fetch(self.name, repo, (file,), "model") / file] if weights else []

    def _created(self, input_size: Size, **wanted: Any) -> "nn.Module":
        from timm import create_model

        try:
            model: nn.Module = create_model(self.source, **wanted)
        except (AssertionError, ValueError, TypeError) as error:
            if input_size is None:
                raise
            reason = reason_of(error)
            raise UsageError(
                f"{self.name} cannot take images of {input_size} pixels ({reason}); leave the "
                "input size out."
            ) from None
        return model

    def check(self, model: "nn.Module", weights: bool) -> None:
        """Raises an error if an image cannot be prepared, or if the folder's weights do not fit."""
        from timm.data import resolve_data_config

        images.check(resolve_data_config(pretrained_cfg=self.config))
        if weights and any(self.files(True)[1:]):
            self._check_whole(None)

    def _check_whole(self, classes: int | None) -> None:
        """Raises ValueError if the folder lacks weights of its model.

        timm does not notice that for another number of classes; classes: None for no classifier.
        """
        import torch
        from timm import create_model

        stored = self.config.get("num_classes")
        if stored is None or stored == classes:
            return
        with torch.device("meta"), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")  # no weight is copied
            try:
                for others in (
                    {},
                    {"num_classes": stored + 1},
                ):  # the second one skips the classifier
                    overlay = self._classifier()
                    create_model(self.source, True, pretrained_cfg_overlay=overlay, **others)
            except RuntimeError as error:  # torch names the model, then all that is missing
                if lacks_memory(error):
                    raise
                reason = " ".join(str(error).split())
                raise ValueError(reason[: documents.LONGEST]) from None
        if classes is not None:
            log.warning("the classifier of %s is new; it is trained from random weights", self.name)

    def _classifier(self) -> dict[str, Any]:
        """The setting that names the classifier, so that timm can skip it; empty if unknown."""
        from timm.models import get_pretrained_cfg

        config: Any = get_pretrained_cfg(self.timm_name.split(".")[0])
        missing = "classifier" not in self.config and config is not None
        return {"classifier": config.classifier} if missing else {}

    @property
    def config(self) -> dict[str, Any]:
        """timm's settings for the pretrained weights; empty if it has none."""
        if self.folder is not None:
            config = documents.read_foreign(self.folder / "config.json")
            return dict(config.get("pretrained_cfg", config))  # timm once wrote both as one
        from timm.models import get_pretrained_cfg

        weights: Any = get_pretrained_cfg(self.timm_name)
        return {} if weights is None else dict(weights.to_dict())

    @property
    def tagged(self) -> str:
        """The architecture with the tag of its weights; raises UsageError if it has no weights."""
        from timm.models import get_pretrained_cfg

        config: Any = get_pretrained_cfg(self.timm_name)
        if config is None or not (config.hf_hub_id or config.url or config.file):
            raise UsageError(
                f"{self.name} has no pretrained weights; choose an architecture that has, or "
                "train it with --from-scratch."
            )
        return f"{config.architecture}.{config.tag}" if config.tag else str(config.architecture)

    def data_config(self, model: "nn.Module", input_size: Size) -> dict[str, Any]:
        from timm.data import resolve_model_data_config

        return images.resized(resolve_model_data_config(model), input_size)

    def save(
        self, model: "nn.Module", classes: Sequence[str], input_size: Size, folder: Path
    ) -> None:
        """Writes what `timm.create_model("local-dir:FOLDER", pretrained=True)` loads."""
        from timm.models import save_for_hf

        save_for_hf(
            model,
            folder,
            model_config={"label_names": list(classes)},
            model_args={**self.args, **self.settings(input_size)},
            safe_serialization=True,
        )

    def load(self, folder: Path, input_size: Size = None) -> tuple["nn.Module", Transform]:
        from timm import create_model

        model: nn.Module = create_model(f"local-dir:{folder}", pretrained=True)
        return model, self.transform(model, input_size)


def in_folder(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model in a local folder, by its config.json.

    Raises DataError if timm lacks its architecture.
    """
    from timm.models import is_model

    timm_name = str(config["architecture"])
    if not is_model(timm_name.split(".")[0]):
        raise DataError(
            f"{folder} names an architecture that timm lacks, {timm_name}; update timm."
        )
    args = {**(config.get("model_args") or {})}
    args.pop("num_classes", None)  # the data set determines it
    return {"timm_name": timm_name, "folder": folder, "args": args}
