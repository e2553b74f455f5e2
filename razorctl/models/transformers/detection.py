"""Detection models of transformers: DETR and its kin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.config.job import Job
from razorctl.config.job_checks import scale_numbers
from razorctl.errors import UsageError
from razorctl.models import boxes
from razorctl.models.image_model import ImageModel
from razorctl.models.model import Model, Size
from razorctl.models.transformers import vision
from razorctl.models.transformers.pretrained_files import (
    PROCESSOR,
    has_argument,
    name_classes,
    quiet_transformers,
)
from razorctl.models.transformers.pretrained_model import PretrainedModel
from razorctl.system import documents

if TYPE_CHECKING:
    from torch import Tensor, nn

    from razorctl.step import ByLogits

# The types of models with a matcher that can be traced. Those of documents compute no loss.
DETECTORS = frozenset(
    {"conditional_detr", "d_fine", "dab-detr", "deformable_detr", "detr", "lw_detr", "rf_detr"}
    | {"rt_detr", "rt_detr_v2", "table-transformer", "yolos"}
)
# The types of models whose classes share a softmax with no object, as `DetrImageProcessor` reads.
SOFTMAX = frozenset({"detr", "table-transformer", "yolos"})
SIDE = 640  # pixels, of models whose processor is not known
STEP = 32  # a side is a multiple of it, since maps of features are halved up to five times


@dataclass(frozen=True, kw_only=True)
class ObjectDetector(ImageModel, PretrainedModel):
    """A pretrained model that learns the objects of an image, each with a class and a box.

    side: pixels of an image's side by default; None is as its image processor says.
    """

    side: int | None = None

    @property
    def auto(self) -> Any:
        from transformers import AutoModelForObjectDetection

        return AutoModelForObjectDetection

    @property
    def _rows(self) -> Any:
        return boxes

    @cached_property
    def fresh(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the weights whose shapes depend on the number of classes."""
        import torch

        with torch.device("meta"):
            one, two = (self.bare(classes).state_dict() for classes in (1, 2))
        return tuple(name for name, weight in one.items() if weight.shape != two[name].shape)

    def fed(self, job: Job) -> Model:
        """Raises UsageError for a scale that the model cannot take."""
        for side in () if job.scales is None else scale_numbers(job.scales):
            self.size(side)
        return self

    def settings(self, classes: int) -> dict[str, Any]:
        """No other weights are loaded into its backbone: its own files have all."""
        config, settings = self.pretrained.config, super().settings(classes)
        if getattr(config, "use_pretrained_backbone", False):
            settings["use_pretrained_backbone"] = False
        return settings

    @cached_property
    def most_objects(self) -> int:
        """The most objects that it finds in an image."""
        config = self.pretrained.config
        return int(getattr(config, "num_queries", 0) or config.num_detection_tokens)

    def size(self, input_size: Size) -> int:
        side = input_size or self.side or _side(self.pretrained.processor)
        if side % STEP:
            raise UsageError(
                f"{self.name} takes images of a multiple of {STEP} pixels, not {side}; choose "
                f"{max(side // STEP, 1) * STEP}."
            )
        return side

    def data_config(self, model: "nn.Module", input_size: Size) -> dict[str, Any]:
        processor = self.pretrained.processor
        config = vision.data_config(processor, self.size(input_size))
        if not processor.get("do_normalize", True):
            config |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
        return {
            **config,
            "letterbox": not _stretches(processor),
            "mask": _masked(model),
            "most": self.most_objects,
        }

    def example(
        self, model: "nn.Module", batch_size: int, input_size: Size = None
    ) -> "dict[str, Tensor]":
        import torch

        side = self.size(input_size)
        inputs = {"pixel_values": torch.zeros(batch_size, 3, side, side)}
        if _masked(model):
            inputs["pixel_mask"] = torch.ones(batch_size, side, side, dtype=torch.long)
            inputs["pixel_mask"][:, -STEP:] = 0  # padding, as attention needs no mask without any
        return {**inputs, "extent": torch.full((batch_size, 2), float(side))}

    def batch(
        self, model: "nn.Module", batch_size: int, input_size: Size, classes: int
    ) -> tuple[Any, "Tensor"]:
        """`example` with as many objects in each image as `matched_losses` has in a trace."""
        import torch

        from razorctl.config.tasks import NO_LABEL

        inputs = self.example(model, batch_size, input_size)
        labels = torch.full((batch_size, self.most_objects), NO_LABEL)
        crowd = labels.clone()
        labels[:, : boxes.DRAWN] = 0
        shares = torch.full((*labels.shape, 4), 0.5)
        return {**inputs, "boxes": shares, "crowd": crowd}, labels

    def logits(self, model: "nn.Module", inputs: "Mapping[str, Tensor]") -> "Tensor":
        from razorctl.models.transformers.matched_losses import guesses, run

        return guesses(model, run(model, inputs))

    def losses(self, job: Job, class_weights: "Tensor | None" = None) -> "ByLogits":
        from razorctl.models.transformers.matched_losses import MatchedLosses

        return MatchedLosses(self.logits, job, class_weights)

    def save(self, model: Any, classes: Sequence[str], input_size: Size, folder: Path) -> None:
        """Writes what `from_pretrained(folder)` of the model and of its image processor load.

        The processor pads to a square, as training does, and keeps proportions, unlike YOLOS's.
        """
        name_classes(model, classes, self.task)
        with quiet_transformers():
            model.save_pretrained(folder)
        side, processor = self.size(input_size), self.pretrained.processor
        both, kind = dict.fromkeys(("height", "width"), side), self.pretrained.config.model_type
        settings, usual = {**processor, "size": both}, "RTDetrImageProcessor"
        if not _stretches(processor):
            settings["size"] = dict.fromkeys(("shortest_edge", "longest_edge"), side)
            settings |= {"do_pad": True, "pad_size": both}
            usual = "DeformableDetrImageProcessor"
        usual = "DetrImageProcessor" if kind in SOFTMAX else usual
        if kind == "yolos" or "image_processor_type" not in settings:
            settings["image_processor_type"] = usual
        settings.pop("max_size", None)
        (folder / PROCESSOR).write_text(documents.text(settings, indent=2) + "\n")


def _masked(model: "nn.Module") -> bool:
    """Whether a model takes a mask of the padding."""
    return has_argument(model, "pixel_mask")


def _stretches(processor: Mapping[str, Any]) -> bool:
    """Whether an image processor changes the proportions of images."""
    size = processor.get("size")
    return isinstance(size, Mapping) and "height" in size


def _side(processor: Mapping[str, Any]) -> int:
    """The side of images by the settings of an image processor: their shorter one, if not both."""
    size = processor.get("size", SIDE)
    if isinstance(size, Mapping):
        size = size.get("height", size.get("shortest_edge", SIDE))
    return int(size) // STEP * STEP
