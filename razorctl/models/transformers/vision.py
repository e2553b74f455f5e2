"""Image classifiers and segmentation models of transformers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from razorctl.errors import UsageError
from razorctl.models import images
from razorctl.models.image_model import ImageModel
from razorctl.models.model import Size
from razorctl.models.transformers.pretrained_files import (
    PROCESSOR,
    name_classes,
    quiet_transformers,
)
from razorctl.models.transformers.pretrained_model import PretrainedModel
from razorctl.system import documents

if TYPE_CHECKING:
    from torch import Tensor, nn

FRESH = ("classifier.", "decode_head.classifier.", "auxiliary_head.classifier.")
SIDE, WIDE_SIDE = 224, 512  # pixels, of a classifier and of a segmentation model
FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL's numbers


@dataclass(frozen=True, kw_only=True)
class VisionModel(ImageModel, PretrainedModel):
    """A pretrained model that learns a label for each image, or for each pixel."""

    fresh: ClassVar[tuple[str, ...]] = FRESH

    @property
    def auto(self) -> Any:
        from transformers import AutoModelForImageClassification, AutoModelForSemanticSegmentation

        pixels = self.task == "segmentation"
        return AutoModelForSemanticSegmentation if pixels else AutoModelForImageClassification

    def size(self, input_size: Size) -> int:
        config = self.pretrained.config
        side = getattr(getattr(config, "vision_config", config), "image_size", None)  # CLIP has two
        if not isinstance(side, int):
            return input_size or (WIDE_SIDE if self.task == "segmentation" else SIDE)
        if input_size not in (None, side):
            raise UsageError(
                f"{self.name} takes images of {side} pixels, not {input_size}; leave the input "
                "size out."
            )
        return side

    def data_config(self, model: "nn.Module", input_size: Size) -> dict[str, Any]:
        return data_config(self.pretrained.processor, self.size(input_size))

    def example(self, model: "nn.Module", batch_size: int, input_size: Size = None) -> "Tensor":
        return images.example(data_config({}, self.size(input_size)), batch_size)

    def logits(self, model: "nn.Module", inputs: "Tensor") -> "Tensor":
        import torch.nn.functional as F

        logits: Tensor = model(pixel_values=inputs).logits
        if self.task != "segmentation" or logits.shape[-2:] == inputs.shape[-2:]:
            return logits
        return F.interpolate(logits, inputs.shape[-2:], mode="bilinear", align_corners=False)

    def save(self, model: Any, classes: Sequence[str], input_size: Size, folder: Path) -> None:
        """Writes what `from_pretrained(folder)` of the model and of its image processor load."""
        name_classes(model, classes, self.task)
        with quiet_transformers():
            model.save_pretrained(folder)
        pixels = self.size(input_size)
        settings = {**self.pretrained.processor, "size": {"height": pixels, "width": pixels}}
        (folder / PROCESSOR).write_text(documents.text(settings, indent=2) + "\n")

    def check(self, model: Any, weights: bool) -> None:
        """Also tries to prepare an image as the folder says."""
        super().check(model, weights)
        if self.pretrained.local(PROCESSOR):
            with self.pretrained.reading(self.pretrained.folder(), PROCESSOR):
                images.check(self.data_config(model, None))


def data_config(processor: Mapping[str, Any], pixels: int) -> dict[str, Any]:
    """The data config, as in `models.images`, that the settings of an image processor mean."""
    return {
        "input_size": (3, pixels, pixels),
        "mean": tuple(processor.get("image_mean") or images.MEAN),
        "std": tuple(processor.get("image_std") or images.STD),
        "interpolation": FILTERS.get(processor.get("resample", 2), "bilinear"),
        "crop_pct": 1.0,
    }
