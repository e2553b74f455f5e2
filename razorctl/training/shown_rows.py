"""Training rows as text, for a dry run: their inputs and labels as the model gets them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from razorctl import models
from razorctl.config.job import Job
from razorctl.config.tasks import LANGUAGE, NO_LABEL
from razorctl.units import percent

ROWS, LONGEST = 2, 300  # rows that are shown, and most characters of a row


def shown(
    rows: Any, family: models.Model, model: Any, job: Job, classes: Sequence[str]
) -> list[str]:
    """The first rows, each as its inputs and its label; texts are decoded from their tokens.

    rows: of the training split, as for `Model.transform`.
    """
    batch = family.transform(model, job.input_size)(rows[:ROWS])
    return [
        _cut(_row(family, inputs, label, job, classes))
        for inputs, label in zip(batch["inputs"], batch["labels"], strict=True)
    ]


def _row(family: models.Model, inputs: Any, label: Any, job: Job, classes: Sequence[str]) -> str:
    if job.task == "embedding" and family.modality == "image":
        shape = " x ".join(map(str, inputs["pixel_values"].shape))
        return f"image of {shape} | {family.decode(inputs['input_ids'].tolist())}"
    if job.task == "detection":
        shape = " x ".join(map(str, inputs["pixel_values"].shape))
        there = [classes[number] for number in label.tolist() if number != NO_LABEL]
        return f"image of {shape} -> {objects_in_words(there)}"
    if family.modality == "image":
        shape = " x ".join(map(str, inputs.shape))
        return f"image of {shape} -> {label_in_words(torch.as_tensor(label), job, classes)}"
    if job.task == "embedding":
        texts = [_text(family, each) for each in inputs.values()]
        score = f" -> {label:g}" if torch.as_tensor(label).is_floating_point() else ""
        return f"{' | '.join(texts)}{score}"
    ids = inputs["input_ids"]
    if "attention_mask" in inputs:
        ids = ids[inputs["attention_mask"].bool()]
    if job.task in LANGUAGE:
        return family.decode(ids.tolist())
    if job.task == "token-classification":
        pairs = zip(ids.tolist(), torch.as_tensor(label)[: len(ids)].tolist(), strict=True)
        return " ".join(
            family.decode([token]).strip() + (f"/{classes[tag]}" if tag != NO_LABEL else "")
            for token, tag in pairs
        )
    return f"{_text(family, inputs)} -> {label_in_words(torch.as_tensor(label), job, classes)}"


def _text(family: models.Model, inputs: Any) -> str:
    """The text of padded tokens."""
    return family.decode(inputs["input_ids"][inputs["attention_mask"].bool()].tolist())


def objects_in_words(names: Sequence[str]) -> str:
    """The number of objects of each class, such as "2 cat, 1 dog"."""
    counts = Counter(names).items()
    return ", ".join(f"{count} {name}" for name, count in counts) or "no object"


def label_in_words(label: Tensor, job: Job, classes: Sequence[str]) -> str:
    """A label of a row of images or texts; of a mask its classes with their shares of pixels."""
    if job.task == "regression":
        return f"{label.item():g}"
    if job.task == "multi-label":
        return ", ".join(name for name, on in zip(classes, label, strict=True) if on) or "no label"
    if job.task != "segmentation":
        return classes[int(label)]
    numbers, counts = torch.unique(label, return_counts=True)
    parts = zip(numbers.tolist(), (counts / label.numel()).tolist(), strict=True)
    return ", ".join(
        f"{'no label' if number == NO_LABEL else classes[number]} {percent(share)}"
        for number, share in parts
    )


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."
