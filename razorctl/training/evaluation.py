"""What a classifier makes of labeled rows, in torchmetrics' figures."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from razorctl.job import Job
from razorctl.step import autocast

TOP = 5  # guesses of `top5_accuracy`, which fewer classes have no use for


@torch.no_grad()
def evaluate(
    model: nn.Module,
    logits: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[tuple[Any, Tensor]],
    classes: int,
    job: Job,
    rows: int | None = None,
) -> dict[str, float]:
    """Runs the model in eval mode over batches of inputs and labels, on their device. Collective.

    Returns the mean cross-entropy `loss`; `accuracy`; `balanced_accuracy` and `f1`, which are
    means over classes; `matthews`, the correlation of labels and guesses; and with more than TOP
    classes `top5_accuracy`. `job` says in which precision it runs. rows: how many count, from the
    first on; None is all. Several processes each have their own rows, and return the same.
    """
    from torchmetrics import MeanMetric  # takes seconds

    model.eval()
    figures, losses = _figures(classes), MeanMetric()
    for inputs, labels in batches:
        with autocast(labels.device, job):
            output = logits(model, inputs).float()
        if rows is not None:
            output, labels = output[:rows], labels[:rows]
            rows -= len(labels)
        if len(labels):
            figures.to(labels.device).update(output, labels)
            losses.to(labels.device).update(F.cross_entropy(output, labels), len(labels))
    found = {"loss": losses, **figures}
    return {name: metric.compute().item() for name, metric in found.items()}


def _figures(classes: int) -> Any:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import (
        MulticlassAccuracy,
        MulticlassF1Score,
        MulticlassMatthewsCorrCoef,
    )

    found: dict[str, Any] = {
        "accuracy": MulticlassAccuracy(classes, average="micro"),
        "balanced_accuracy": MulticlassAccuracy(classes, average="macro"),
        "f1": MulticlassF1Score(classes, average="macro"),
        "matthews": MulticlassMatthewsCorrCoef(classes),
    }
    if classes > TOP:
        found["top5_accuracy"] = MulticlassAccuracy(classes, top_k=TOP, average="micro")
    return MetricCollection(found)
