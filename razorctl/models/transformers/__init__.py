"""Models of transformers: registered ones, any on the hub, and those in local folders."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from razorctl.errors import UsageError
from razorctl.models import Modality, Model, Named
from razorctl.models.transformers.checkpoint import Checkpoint
from razorctl.models.transformers.classification import classifier
from razorctl.models.transformers.known import KNOWN
from razorctl.models.transformers.language import language_model
from razorctl.models.transformers.vision import vision_model
from razorctl.tasks import Task

PREFIX = "hf:"
# Batch size and epochs as in Sheared Backpropagation, section 5.2, which states no learning rate.
# AdamW's is one that BERT's authors tried (2018, appendix A.3), with their weight decay.
TEXT_DEFAULTS = {
    "batch_size": 32,
    "epochs": 5,
    "optimizer": "adamw",
    "sgd": {"learning_rate": 0.01},
    "adamw": {"learning_rate": 2e-5, "weight_decay": 0.01},
}
# Usual values of fine-tuning, none of them measured here; so are those of images.
LANGUAGE_DEFAULTS = {
    "batch_size": 8,
    "steps": 1000,
    "optimizer": "adamw",
    "sgd": {"learning_rate": 0.01},
    "adamw": {"learning_rate": 2e-5, "weight_decay": 0.01},
}
VISION_DEFAULTS = {
    "batch_size": 16,
    "steps": 5000,
    "sgd": {"learning_rate": 0.01},
    "adamw": {"learning_rate": 6e-5, "weight_decay": 0.01},
}
# What transformers lists models of other tasks under -> what these do.
OTHERS = {
    "SPEECH_SEQ_2_SEQ": "speech to text",
    "CTC": "speech to text",
    "AUDIO_CLASSIFICATION": "classes of sound",
    "TEXT_TO_SPECTROGRAM": "text to speech",
    "TEXT_TO_WAVEFORM": "text to speech",
    "IMAGE_TEXT_TO_TEXT": "images and texts to text",
    "SEQ_TO_SEQ_CAUSAL_LM": "text to text",
    "OBJECT_DETECTION": "object detection",
    "ZERO_SHOT_OBJECT_DETECTION": "object detection",
    "UNIVERSAL_SEGMENTATION": "segmentation of objects",
    "MASK_GENERATION": "masks of objects",
    "DEPTH_ESTIMATION": "depth",
    "VIDEO_CLASSIFICATION": "video",
    "ZERO_SHOT_IMAGE_CLASSIFICATION": "images and texts",
    "TIME_SERIES_PREDICTION": "time series",
}


def tasks(checkpoint: Checkpoint) -> tuple[Task, ...]:
    """What a checkpoint can be trained for, by its config; raises UsageError if that is nothing.

    Encoders such as BERT are no causal language models, although transformers lists them as such.
    """
    from transformers.models.auto import modeling_auto as auto

    kind = checkpoint.config.model_type
    lists: dict[Task, Any] = {
        "masked-lm": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "causal-lm": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "segmentation": auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
    }
    found: list[Task] = [task for task, names in lists.items() if kind in names]
    if "masked-lm" in found and "causal-lm" in found:
        written = " ".join(getattr(checkpoint.config, "architectures", None) or ())
        found.remove("masked-lm" if "CausalLM" in written else "causal-lm")
    classes = (
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    )
    if any(kind in names for names in classes):
        # What a decoder or a segmentation model is mostly trained for is its own task.
        own = found[:1] in (["causal-lm"], ["segmentation"])
        found.insert(len(found) if own else 0, "classification")
    if getattr(checkpoint.config, "is_encoder_decoder", False):
        found = [task for task in found if task == "masked-lm"]
    if not found:
        raise UsageError(
            f"{checkpoint.name} is {_kind(checkpoint)}, which razorctl cannot train; "
            "choose a model of images, an encoder or a decoder of texts, or one for segmentation."
        )
    return tuple(found)


def _kind(checkpoint: Checkpoint) -> str:
    """What a model that cannot be trained is, as a Whisper model (speech to text)."""
    from transformers.models.auto import modeling_auto as auto

    config = checkpoint.config
    name = type(config).__name__.removesuffix("Config")
    lists = (getattr(auto, f"MODEL_FOR_{of}_MAPPING_NAMES", ()) for of in OTHERS)
    for what, known in zip(OTHERS.values(), lists, strict=True):
        if config.model_type in known:
            return f"a model of the type {name} ({what})"
    return f"a model of the type {name}"


def modality(checkpoint: Checkpoint) -> Modality:
    """What it takes, by its config."""
    from transformers.models.auto import modeling_auto as auto

    pictures = (
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
    )
    return "image" if any(checkpoint.config.model_type in names for names in pictures) else "text"


def of(
    checkpoint: Checkpoint,
    summary: str,
    takes: Modality,
    possible: tuple[Task, ...],
    defaults: Mapping[str, Any],
) -> Named:
    """What the name of a checkpoint stands for."""

    def model(task: Task) -> Model:
        if takes == "image":
            return vision_model(checkpoint, task, summary, {**VISION_DEFAULTS, **defaults})
        if task == "classification":
            return classifier(checkpoint, summary, {**TEXT_DEFAULTS, **defaults})
        return language_model(checkpoint, task, summary, {**LANGUAGE_DEFAULTS, **defaults})

    return Named(checkpoint.name, summary, takes, possible, model)


def from_hub(
    name: str,
    summary: str,
    repo: str,
    config: Mapping[str, Any],
    possible: tuple[Task, ...] = ("classification", "masked-lm"),
    takes: Modality = "text",
    defaults: Mapping[str, Any] | None = None,
) -> Named:
    """A registered name; `config` is that of its repository, so that it is planned for offline."""
    checkpoint = Checkpoint(name, repo, config)
    return of(checkpoint, f"{summary}; from the hub", takes, possible, defaults or {})


def named(name: str) -> Named:
    """What `hf:ORG/NAME` stands for, by its config; raises what reading that raises."""
    repo = name.removeprefix(PREFIX)
    if repo.count("/") > 1 or not all(repo.split("/")):
        raise UsageError(f"{name} is not the name of a model; write {PREFIX}ORG/NAME.")
    return _described(Checkpoint(name, repo), f"{repo} on the hub")


def knows(name: str) -> bool:
    """Whether a name is ORG/NAME, as on the hub."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None


def owns(config: Mapping[str, Any]) -> bool:
    """Whether a folder with that config.json has a model of transformers."""
    return "model_type" in config


def local(name: str, folder: Path, _: Mapping[str, Any]) -> Named:
    """What a local folder has."""
    return _described(Checkpoint(name, folder), f"a model of transformers in {folder}")


def _described(checkpoint: Checkpoint, summary: str) -> Named:
    return of(checkpoint, summary, modality(checkpoint), tasks(checkpoint), {})


MODELS = tuple(from_hub(name, **entry) for name, entry in KNOWN.items())
