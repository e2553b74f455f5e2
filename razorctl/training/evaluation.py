"""The figures of a model on labeled rows, by torchmetrics."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from razorctl import processes
from razorctl.job import Job
from razorctl.layers.lazy_output import lazily
from razorctl.step import autocast, losses_of
from razorctl.tasks import LANGUAGE, NO_LABEL
from razorctl.training.metrics import MOST, ByClass

Batch = tuple[Any, Tensor]  # inputs and labels
TOP = 5  # guesses of `top5_accuracy`, which fewer classes have no use for
BY_CLASS = "by class "  # begins the names of figures that have a value for each class


@dataclass(frozen=True)
class Evaluation:
    """The figures of `evaluate`, and those of each class if the task has classes."""

    figures: dict[str, float]
    by_class: ByClass | None

    @property
    def by_class_document(self) -> dict[str, Any] | None:
        """`by_class` as a JSON value."""
        return None if self.by_class is None else asdict(self.by_class)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    logits: Callable[[nn.Module, Any], Tensor],
    batches: Iterable[Batch],
    classes: int,
    job: Job,
) -> Evaluation:
    """Runs the model in eval mode over batches of inputs and labels, on their device. Collective.

    The figures are the mean cross-entropy `loss` and the `accuracy`, over all labels that count;
    for classification also `balanced_accuracy` and `f1`, which are means over classes; `matthews`,
    the correlation of labels and guesses; and with more than TOP classes `top5_accuracy`; for
    segmentation also `mean_iou`, the mean over classes of intersection over union; for a language
    model also `perplexity`. Several processes each have their own rows, and return the same
    figures.
    """
    from torchmetrics import MeanMetric  # takes seconds

    model.eval()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    figures, losses = _figures(classes, job).to(device), MeanMetric().to(device)
    for (inputs, labels), counts in _in_step(batches, device):
        with autocast(device, job), lazily(model):
            output = logits(model, inputs)
            if job.task not in LANGUAGE:
                output = output.float()
            loss = losses_of(output, labels, job, "sum") if counts else None
        if loss is not None:
            count = (labels != NO_LABEL).sum()
            losses.update(loss.float() / count.clamp(min=1), count)
            figures.update(*_guesses(output, labels, job))
    values: dict[str, Tensor] = {"loss": losses.compute(), **figures.compute()}
    parts: dict[str, Any] = {
        name.removeprefix(BY_CLASS): value.tolist()
        for name, value in values.items()
        if name.startswith(BY_CLASS)
    }
    single = {name: v.item() for name, v in values.items() if not name.startswith(BY_CLASS)}
    if job.task in LANGUAGE:
        single["perplexity"] = torch.tensor(single["loss"]).exp().item()
    if not parts:
        return Evaluation(single, None)
    of_classes = [right + missed for right, _, _, missed, _ in parts.pop("counts")]
    by_class = ByClass(of_classes, confusion=parts.pop("confusion", None), **parts)
    return Evaluation(single, by_class)


def _guesses(output: Tensor, labels: Tensor, job: Job) -> tuple[Tensor, Tensor]:
    """Arguments of `_figures` for a batch: guesses and labels, or values and weights of a mean."""
    if job.classifies:
        return output, labels
    if job.task == "segmentation":
        return output.argmax(1), labels
    return (output.argmax(-1) == labels).float(), (labels != NO_LABEL).float()


def _in_step(batches: Iterable[Batch], device: torch.device) -> Iterator[tuple[Batch, bool]]:
    """Batches, and whether they count, until no process has any more: models may be collective.

    A process without further batches repeats its last one.
    """
    remaining, batch = iter(batches), None
    while True:
        following = next(remaining, None)
        if not processes.most(following is not None, device):
            return
        batch = batch if following is None else following
        assert batch is not None
        yield batch, following is not None


def _figures(classes: int, job: Job) -> Any:
    from torchmetrics import MeanMetric, MetricCollection
    from torchmetrics.classification import (
        MulticlassAccuracy,
        MulticlassF1Score,
        MulticlassJaccardIndex,
        MulticlassMatthewsCorrCoef,
    )

    if job.task in LANGUAGE:
        return MetricCollection({"accuracy": MeanMetric()})
    if job.task == "segmentation":
        return MetricCollection(
            {
                "accuracy": MulticlassAccuracy(classes, average="micro", ignore_index=NO_LABEL),
                "mean_iou": MulticlassJaccardIndex(classes, ignore_index=NO_LABEL),
                **_by_class(classes, NO_LABEL),
            }
        )
    figures: dict[str, Any] = {
        "accuracy": MulticlassAccuracy(classes, average="micro"),
        "balanced_accuracy": MulticlassAccuracy(classes, average="macro"),
        "f1": MulticlassF1Score(classes, average="macro"),
        "matthews": MulticlassMatthewsCorrCoef(classes),
    }
    if classes > TOP:
        figures["top5_accuracy"] = MulticlassAccuracy(classes, top_k=TOP, average="micro")
    return MetricCollection({**figures, **_by_class(classes)})


def _by_class(classes: int, ignored: int | None = None) -> dict[str, Any]:
    """Metrics with a value for each class; a collection computes what they share once."""
    from torchmetrics.classification import (
        MulticlassConfusionMatrix,
        MulticlassF1Score,
        MulticlassPrecision,
        MulticlassRecall,
        MulticlassStatScores,
    )

    kinds = {
        "counts": MulticlassStatScores,
        "precision": MulticlassPrecision,
        "recall": MulticlassRecall,
        "f1": MulticlassF1Score,
    }
    metrics: dict[str, Any] = {
        BY_CLASS + name: kind(classes, average="none", ignore_index=ignored)
        for name, kind in kinds.items()
    }
    if classes <= MOST:
        metrics[BY_CLASS + "confusion"] = MulticlassConfusionMatrix(classes, ignore_index=ignored)
    return metrics
