"""Image classifiers and segmentation models of transformers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from razorctl.config.tasks import Task
from razorctl.errors import UsageError
from razorctl.models import Model, Rows, images, masks
from razorctl.models.transformers.pretrained_files import (
    PROCESSOR,
    PretrainedFiles,
    name_classes,
    quiet_transformers,
)
from razorctl.system import documents

if TYPE_CHECKING:
    from torch import Tensor, nn

FRESH = ("classifier.", "decode_head.classifier.", "auxiliary_head.classifier.")
SIDE, WIDE_SIDE = 224, 512  # pixels, of a classifier and of a segmentation model
FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL's numbers


def _auto(task: Task) -> Any:
    from transformers import AutoModelForImageClassification, AutoModelForSemanticSegmentation

    if task == "segmentation":
        return AutoModelForSemanticSegmentation
    return AutoModelForImageClassification


def side(pretrained: PretrainedFiles, task: Task, input_size: int | None) -> int:
    """The pixels of an image's side; raises UsageError for a size that the model cannot take."""
    config = pretrained.config
    own = getattr(getattr(config, "vision_config", config), "image_size", None)  # as of CLIP
    if isinstance(own, int) and input_size not in (None, own):
        raise UsageError(
            f"{pretrained.name} takes images of {own} pixels, not {input_size}; leave the input "
            "size out."
        )
    usual = WIDE_SIDE if task == "segmentation" else SIDE
    return input_size or (own if isinstance(own, int) else usual)


def data_config(processor: Mapping[str, Any], pixels: int) -> dict[str, Any]:
    """The data config, as in `models.images`, that the settings of an image processor mean."""
    return {
        "input_size": (3, pixels, pixels),
        "mean": tuple(processor.get("image_mean") or images.MEAN),
        "std": tuple(processor.get("image_std") or images.STD),
        "interpolation": FILTERS.get(processor.get("resample", 2), "bilinear"),
        "crop_pct": 1.0,
    }


def logits(task: Task, model: "nn.Module", inputs: "Tensor") -> "Tensor":
    """Logits [batch, classes], or [batch, classes, height, width] in the size of the images."""
    import torch.nn.functional as F

    logits: Tensor = model(pixel_values=inputs).logits
    if task != "segmentation" or logits.shape[-2:] == inputs.shape[-2:]:
        return logits
    return F.interpolate(logits, inputs.shape[-2:], mode="bilinear", align_corners=False)


def vision_model(
    pretrained: PretrainedFiles, task: Task, summary: str, defaults: Mapping[str, Any]
) -> Model:
    """A pretrained model that learns a label for each image, or for each pixel."""
    inputs: Any = masks if task == "segmentation" else images

    def bare(classes: int, input_size: int | None = None) -> "nn.Module":
        side(pretrained, task, input_size)
        return pretrained.bare(_auto(task), num_labels=classes)

    def build(classes: int, input_size: int | None = None) -> "nn.Module":
        side(pretrained, task, input_size)
        return pretrained.built(_auto(task), FRESH, num_labels=classes)

    def example(_: "nn.Module", batch_size: int, input_size: int | None = None) -> "Tensor":
        return images.example(data_config({}, side(pretrained, task, input_size)), batch_size)

    def config(input_size: int | None) -> dict[str, Any]:
        return data_config(pretrained.processor, side(pretrained, task, input_size))

    def transform(_: "nn.Module", input_size: int | None = None) -> Callable[[Rows], Rows]:
        transform: Callable[[Rows], Rows] = inputs.transform(config(input_size))
        return transform

    def augmented(_: "nn.Module", input_size: int | None, augment: str) -> Callable[[Rows], Rows]:
        transform: Callable[[Rows], Rows] = inputs.augmented(config(input_size), augment)
        return transform

    def save(model: Any, classes: Sequence[str], input_size: int | None, folder: Path) -> None:
        """Writes what `from_pretrained(folder)` of the model and of its image processor load."""
        name_classes(model, classes, task)
        with quiet_transformers():
            model.save_pretrained(folder)
        pixels = side(pretrained, task, input_size)
        settings = {**pretrained.processor, "size": {"height": pixels, "width": pixels}}
        (folder / PROCESSOR).write_text(documents.text(settings, indent=2) + "\n")

    return Model(
        name=pretrained.name,
        summary=summary,
        modality="image",
        task=task,
        build=build,
        bare=bare,
        transform=transform,
        example=example,
        logits=partial(logits, task),
        save=save,
        load=partial(load, task),
        defaults=defaults,
        augmented=augmented,
        check=partial(_check, pretrained, config),
    )


def _check(pretrained: PretrainedFiles, config: Any, model: Any, weights: bool) -> None:
    """`PretrainedFiles.check`, and whether an image can be prepared as the folder says."""
    pretrained.check(FRESH, model, weights)
    if pretrained.local(PROCESSOR):
        with pretrained.reading(pretrained.folder(), PROCESSOR):
            images.check(config(None))


def load(
    task: Task, folder: Path, input_size: int | None = None
) -> tuple["nn.Module", Callable[[Rows], Rows]]:
    """The model and the transform of a folder that `Model.save` wrote."""
    pretrained = PretrainedFiles(str(folder), folder)
    model = pretrained.built(_auto(task))
    return model, vision_model(pretrained, task, "", {}).transform(model, input_size)
