"""Models of transformers: registered ones, any on the hub, and those in local folders."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from razorctl.errors import UsageError
from razorctl.job import Task
from razorctl.models import Modality, Model, Named
from razorctl.models.transformers.checkpoint import Checkpoint
from razorctl.models.transformers.classification import classifier
from razorctl.models.transformers.known import KNOWN
from razorctl.models.transformers.language import language_model
from razorctl.models.transformers.vision import vision_model

PREFIX = "hf:"
# Batch size and epochs as in Sheared Backpropagation, section 5.2, which states no learning rate.
# AdamW's is one that BERT's authors tried (2018, appendix A.3), with their weight decay.
TEXT_DEFAULTS = {
    "batch_size": 32,
    "epochs": 5,
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
    if not found:
        raise UsageError(
            f"{checkpoint.name} is of the type {kind}, which razorctl cannot train; choose a text, "
            "image or segmentation model."
        )
    return tuple(found)


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
