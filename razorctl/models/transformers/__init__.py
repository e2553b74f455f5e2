"""Models of transformers: registered ones, any on the hub, and models in local folders."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from razorctl.config.tasks import LABELED, LANGUAGE, OF_ROWS, Task
from razorctl.errors import UsageError
from razorctl.models.model import Modality, Model, ModelEntry
from razorctl.models.transformers.classification import TextClassifier
from razorctl.models.transformers.detection import DETECTORS, ObjectDetector
from razorctl.models.transformers.embedding import TextEmbedder, pooling_of
from razorctl.models.transformers.language import LanguageModel
from razorctl.models.transformers.pretrained_files import PretrainedFiles
from razorctl.models.transformers.repositories import ENCODER, REPOSITORIES
from razorctl.models.transformers.tagging import Tagger
from razorctl.models.transformers.towers import KINDS as TOWERS
from razorctl.models.transformers.towers import TwoTowers
from razorctl.models.transformers.vision import VisionModel

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
# Usual values for fine-tuning, as for images; not measured here.
LANGUAGE_DEFAULTS = {
    "batch_size": 8,
    "steps": 1000,
    "optimizer": "adamw",
    "sgd": {"learning_rate": 0.01},
    "adamw": {"learning_rate": 2e-5, "weight_decay": 0.01},
}
EMBEDDING_DEFAULTS = {**TEXT_DEFAULTS, "batch_size": 64}
# Usual values for fine-tuning CLIP; not measured here.
TOWER_DEFAULTS = {**EMBEDDING_DEFAULTS, "adamw": {"learning_rate": 1e-5, "weight_decay": 0.1}}
VISION_DEFAULTS = {
    "batch_size": 16,
    "steps": 5000,
    "sgd": {"learning_rate": 0.01},
    "adamw": {"learning_rate": 6e-5, "weight_decay": 0.01},
}
# RT-DETR's learning rate and weight decay for fine-tuning all weights (Zhao et al., 2024, table A),
# which has a tenth of it for the backbone.
DETECTION_DEFAULTS = {
    "batch_size": 16,
    "steps": 5000,
    "optimizer": "adamw",
    "sgd": {"learning_rate": 1e-3},
    "adamw": {"learning_rate": 1e-4, "weight_decay": 1e-4},
}
# transformers' lists of models for other tasks -> the purpose of these models.
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


def tasks_of(pretrained: PretrainedFiles) -> tuple[Task, ...]:
    """The tasks that a model can be trained for, by its config; raises UsageError if there is none.

    transformers lists encoders such as BERT as causal language models, too; here they are not.
    """
    from transformers.models.auto import modeling_auto as auto

    kind = pretrained.config.model_type
    lists: dict[Task, Any] = {
        "masked-lm": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "causal-lm": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "segmentation": auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
        "detection": DETECTORS,
    }
    tasks: list[Task] = [task for task, names in lists.items() if kind in names]
    if "masked-lm" in tasks and "causal-lm" in tasks:
        architectures = " ".join(getattr(pretrained.config, "architectures", None) or ())
        tasks.remove("masked-lm" if "CausalLM" in architectures else "causal-lm")
    classes = (
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    )
    if any(kind in names for names in classes):
        # For decoders and segmentation models their own task is the usual one.
        own_task_first = tasks[:1] in (["causal-lm"], ["segmentation"], ["detection"])
        at = len(tasks) if own_task_first else 0
        tags = kind in auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES
        tasks[at:at] = LABELED if tags else OF_ROWS
        if kind in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
            tasks.append("embedding")
    whole = (getattr(pretrained.config, "architectures", None) or ["Model"])[0].endswith("Model")
    if kind in TOWERS and whole:  # others have the tower of images alone
        tasks.append("embedding")
    if getattr(pretrained.config, "is_encoder_decoder", False):
        tasks = [task for task in tasks if task in ("masked-lm", "detection")]
    if not tasks:
        raise UsageError(
            f"{pretrained.name} is {_kind(pretrained)}, which razorctl cannot train; "
            "choose a model of images, or an encoder or a decoder of texts."
        )
    return tuple(tasks)


def _kind(pretrained: PretrainedFiles) -> str:
    """The kind of an untrainable model, such as "a model of the type Whisper (speech)"."""
    from transformers.models.auto import modeling_auto as auto

    config = pretrained.config
    name = type(config).__name__.removesuffix("Config")
    lists = (getattr(auto, f"MODEL_FOR_{of}_MAPPING_NAMES", ()) for of in OTHERS)
    for purpose, model_types in zip(OTHERS.values(), lists, strict=True):
        if config.model_type in model_types:
            return f"a model of the type {name} ({purpose})"
    return f"a model of the type {name}"


def modality_of(pretrained: PretrainedFiles) -> Modality:
    """Whether a model takes images or texts, by its config."""
    from transformers.models.auto import modeling_auto as auto

    pictures = (
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
        TOWERS,
        DETECTORS,
    )
    return "image" if any(pretrained.config.model_type in names for names in pictures) else "text"


def entry_of(
    pretrained: PretrainedFiles,
    summary: str,
    modality: Modality,
    tasks: tuple[Task, ...],
    side: int | None = None,
) -> ModelEntry:
    """The entry of a pretrained model; side: as in `ObjectDetector`."""

    def model(task: Task) -> Model:
        kind: Any = TextClassifier
        defaults: dict[str, Any] = TEXT_DEFAULTS
        more: dict[str, Any] = {}
        if modality == "image" and task == "embedding":
            kind, defaults = TwoTowers, TOWER_DEFAULTS
        elif task == "detection":
            kind, defaults, more = ObjectDetector, DETECTION_DEFAULTS, {"side": side}
        elif modality == "image":
            kind, defaults = VisionModel, VISION_DEFAULTS
        elif task == "token-classification":
            kind = Tagger
        elif task in LANGUAGE:
            kind, defaults = LanguageModel, LANGUAGE_DEFAULTS
        elif task == "embedding":
            more = {"pooling": pooling_of(pretrained, "causal-lm" in tasks)}
            kind, defaults = TextEmbedder, {**EMBEDDING_DEFAULTS, **more}
        made: Model = kind(
            name=pretrained.name,
            summary=summary,
            task=task,
            defaults=defaults,
            pretrained=pretrained,
            **more,
        )
        return made

    return ModelEntry(pretrained.name, summary, modality, tasks, model)


def from_hub(
    name: str,
    summary: str,
    repo: str,
    config: Mapping[str, Any],
    tasks: tuple[Task, ...] = ENCODER,
    modality: Modality = "text",
    side: int | None = None,
) -> ModelEntry:
    """The entry of a repository on the hub; `config` makes it possible to plan for it offline."""
    pretrained = PretrainedFiles(name, repo, config)
    return entry_of(pretrained, f"{summary}; from the hub", modality, tasks, side)


def named(name: str) -> ModelEntry:
    """The entry of `hf:ORG/NAME`, by its config; raises the errors of reading the config."""
    repo = name.removeprefix(PREFIX)
    if repo.count("/") > 1 or not all(repo.split("/")):
        raise UsageError(f"{name} is not the name of a model; write {PREFIX}ORG/NAME.")
    return _described(PretrainedFiles(name, repo), f"{repo} on the hub")


def repository(name: str) -> str | None:
    """The repository of a model's name on the hub; None for a folder and for other libraries."""
    if name in REPOSITORIES:
        return str(REPOSITORIES[name]["repo"])
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else None


def knows(name: str) -> bool:
    """Whether a name is ORG/NAME, as on the hub."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None


def owns(config: Mapping[str, Any]) -> bool:
    """Whether a folder with that config.json has a model of transformers."""
    return "model_type" in config


def local(name: str, folder: Path, _: Mapping[str, Any]) -> ModelEntry:
    """The entry of a local folder."""
    return _described(PretrainedFiles(name, folder), f"a model of transformers in {folder}")


def _described(pretrained: PretrainedFiles, summary: str) -> ModelEntry:
    return entry_of(pretrained, summary, modality_of(pretrained), tasks_of(pretrained))


MODELS = tuple(from_hub(name, **entry) for name, entry in REPOSITORIES.items())
