"""What a classifier makes of labeled rows, in torchmetrics' figures."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from razorctl import processes
from razorctl.job import Job
from razorctl.step import autocast

Batch = tuple[Any, Tensor]  # inputs and labels
TOP = 5  # guesses of `top5_accuracy`, which fewer classes have no use for


@torch.no_grad()
def evaluate(
    model: nn.Module,
    logits: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[tuple[Any, Tensor]],
    classes: int,
    job: Job,
) -> dict[str, float]:
    """Runs the model in eval mode over batches of inputs and labels, on their device. Collective.

    Returns the mean cross-entropy `loss`; `accuracy`; `balanced_accuracy` and `f1`, which are
    means over classes; `matthews`, the correlation of labels and guesses; and with more than TOP
    classes `top5_accuracy`. `job` says in which precision it runs. Several processes each have
    their own rows, and return the same figures.
    """
    from torchmetrics import MeanMetric  # takes seconds

    model.eval()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    figures, losses = _figures(classes).to(device), MeanMetric().to(device)
    for (inputs, labels), counts in _in_step(batches, device):
        with autocast(device, job):
            output = logits(model, inputs).float()
        if counts:
            figures.update(output, labels)
            losses.update(F.cross_entropy(output, labels), len(labels))
    found = {"loss": losses, **figures}
    return {name: metric.compute().item() for name, metric in found.items()}


def _in_step(batches: Iterable[Batch], device: torch.device) -> Iterator[tuple[Batch, bool]]:
    """Batches, and whether they count, until no process has any more: models may be collective.

    A process that has no more runs its last one again.
    """
    left, batch = iter(batches), None
    while True:
        found = next(left, None)
        if not processes.most(found is not None, device):
            return
        batch = batch if found is None else found
        assert batch is not None
        yield batch, found is not None


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
