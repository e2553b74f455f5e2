"""The figures of a model on labeled rows, by torchmetrics."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from razorctl.config.tasks import LANGUAGE, NO_LABEL
from razorctl.errors import FigureError
from razorctl.layers.heads.lazy_tensor import lazily
from razorctl.step import ByLogits, counted, scored
from razorctl.system import processes
from razorctl.training import parallel
from razorctl.training.metrics import MOST, ByClass

Batch = tuple[Any, Tensor]  # inputs and labels
TOP = 5  # guesses of `top5_accuracy`, a figure of tasks with more classes
BY_CLASS = "by class "  # prefix of figures that have a value for each class


@dataclass(frozen=True)
class Evaluation:
    """The figures of `evaluate`, and the figures of each class if the task has classes."""

    figures: dict[str, float]
    by_class: ByClass | None

    @property
    def by_class_document(self) -> dict[str, Any] | None:
        """`by_class` as a JSON value."""
        return None if self.by_class is None else asdict(self.by_class)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    losses: ByLogits,
    batches: Iterable[Batch],
    classes: Sequence[str],
) -> Evaluation:
    """Runs the model in eval mode over batches of inputs and labels, on their device. Collective.

    The figures are the mean `loss` over all labels that count, the figures of the job's task
    (`SCORINGS`), and `perplexity` of language models. Several processes have different rows, and
    return the same figures. Raises FigureError for a figure that is not finite.

    classes: the names of the classes.
    """
    from torchmetrics import MeanMetric, MetricCollection  # takes seconds

    model.eval()
    job, logits = losses.job, losses.logits
    if job.task not in LANGUAGE:
        losses = replace(losses, logits=lambda model, inputs: logits(model, inputs).float())
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    scoring = _scoring(losses, model, classes)
    figures = MetricCollection(scoring.metrics(classes)).to(device)
    mean = MeanMetric(nan_strategy=math.inf).to(device)  # the default ignores NaN
    for (inputs, labels), counts in _in_step(batches, device):
        with scored(device, job), lazily(model):
            if counts and scoring.of_batches:
                output, loss = losses.scored(model, inputs, labels, "sum")
            else:
                output, loss = losses.logits(model, inputs), None
        if counts:
            figures.update(*scoring.guesses(output, labels, inputs))
        if loss is not None:
            count = counted(labels)
            mean.update(loss.float() / count.clamp(min=1), count)
    values: dict[str, Tensor] = figures.compute()
    if "loss" not in values:
        values = {"loss": mean.compute(), **values}
    parts: dict[str, Any] = {
        name.removeprefix(BY_CLASS): value.tolist()
        for name, value in values.items()
        if name.startswith(BY_CLASS)
    }
    single = {name: v.item() for name, v in values.items() if not name.startswith(BY_CLASS)}
    if parts:
        single |= _macro(values[f"{BY_CLASS}counts"], scoring.macro) if scoring.macro else {}
    if job.task in LANGUAGE:
        single["perplexity"] = torch.tensor(single["loss"], dtype=torch.float64).exp().item()
    single |= {name: 0.0 for name in scoring.undefined if math.isnan(single[name])}
    for name, figure in single.items():
        if not math.isfinite(figure):
            raise FigureError(name.replace("_", " "))
    if not parts:
        return Evaluation(single, None)
    if "counts" in parts:
        parts["labels"] = [right + missed for right, _, _, missed, _ in parts.pop("counts")]
    by_class = ByClass(confusion=parts.pop("confusion", None), **parts)
    return Evaluation(single, by_class)


@dataclass(frozen=True)
class Scoring:
    """The figures of a task.

    Args:
        metrics: (names of the classes) -> {figure: its metric}.
        guesses: (logits, labels, inputs) of a batch -> arguments of the metrics.
        undefined: figures that are 0 if they are NaN, as correlations of equal guesses are.
        macro: figures that are means over the classes of the labels.
        of_batches: whether the loss is a mean over batches; otherwise it is among the metrics.
    """

    metrics: Callable[[Sequence[str]], dict[str, Any]]
    guesses: Callable[[Tensor, Tensor, Any], tuple[Any, ...]]
    undefined: Sequence[str] = ()
    macro: Sequence[str] = ()
    of_batches: bool = True


def _scoring(losses: ByLogits, model: nn.Module, classes: Sequence[str]) -> Scoring:
    """The figures of a job; an embedding with one class, its scores, ranks nothing."""
    job = losses.job
    if job.task != "embedding":
        return SCORINGS[job.task or "classification"]
    if len(classes) == 1:
        return Scoring(
            _of_scores,
            lambda output, labels, _: (output.prod(1).sum(-1), labels),
            ("pearson", "spearman"),
        )

    def ranks(_: Sequence[str]) -> dict[str, Any]:
        from razorctl.training.retrieval import Retrieval

        similarity = losses.similarity_of(model)
        scale, bias = parallel.full_tensors((similarity.scale, similarity.bias))
        return {"ranks": Retrieval(replace(similarity, scale=scale, bias=bias))}

    return Scoring(ranks, lambda output, labels, _: (output, labels), of_batches=False)


def _macro(counts: Tensor, names: Sequence[str]) -> dict[str, float]:
    """Means over the classes of the labels; counts: as of torchmetrics' StatScores [classes, 5]."""
    right, wrong, _, missed, labels = counts[counts[:, 4] > 0].double().unbind(-1)
    figures = {
        "balanced_accuracy": right / labels,
        "f1": 2 * right / (2 * right + wrong + missed),
        "mean_iou": right / (right + wrong + missed),
    }
    return {name: figures[name].mean().nan_to_num().item() for name in names}


def _of_classes(classes: Sequence[str]) -> dict[str, Any]:
    from torchmetrics.classification import MulticlassAccuracy, MulticlassMatthewsCorrCoef

    count = len(classes)
    figures: dict[str, Any] = {
        "accuracy": MulticlassAccuracy(count, average="micro"),
        "matthews": MulticlassMatthewsCorrCoef(count),
    }
    if count > TOP:
        figures["top5_accuracy"] = MulticlassAccuracy(count, top_k=TOP, average="micro")
    return {**figures, **_by_class(count)}


def _of_scores(_: Sequence[str]) -> dict[str, Any]:
    numbers = _of_numbers(())
    return {name: numbers[name] for name in ("pearson", "spearman")}


def _of_numbers(_: Sequence[str]) -> dict[str, Any]:
    from torchmetrics import regression as kinds

    from razorctl.training.explained import Explained

    return {
        "mse": kinds.MeanSquaredError(),
        "rmse": kinds.MeanSquaredError(squared=False),
        "mae": kinds.MeanAbsoluteError(),
        "r2": Explained(),
        "pearson": kinds.PearsonCorrCoef(),
        "spearman": kinds.SpearmanCorrCoef(),
    }


def _of_several(classes: Sequence[str]) -> dict[str, Any]:
    from torchmetrics.classification import (
        MultilabelAveragePrecision,
        MultilabelExactMatch,
        MultilabelF1Score,
    )

    count = len(classes)
    return {
        "mean_average_precision": MultilabelAveragePrecision(count, average="macro"),
        "micro_f1": MultilabelF1Score(count, average="micro"),
        "exact_match": MultilabelExactMatch(count),
        **_by_class(count, of="Multilabel"),
    }


def _of_pixels(classes: Sequence[str]) -> dict[str, Any]:
    from torchmetrics.classification import MulticlassAccuracy

    return {
        "accuracy": MulticlassAccuracy(len(classes), average="micro", ignore_index=NO_LABEL),
        **_by_class(len(classes), NO_LABEL),
    }


def _of_tags(classes: Sequence[str]) -> dict[str, Any]:
    from razorctl.training.entities import EntityScores

    return {"entities": EntityScores(classes)}


def _of_objects(classes: Sequence[str]) -> dict[str, Any]:
    from razorctl.training.detections import AveragePrecision

    return {"objects": AveragePrecision(classes)}


def _of_tokens(_: Sequence[str]) -> dict[str, Any]:
    from torchmetrics import MeanMetric

    return {"accuracy": MeanMetric()}


def _right(output: Tensor, labels: Tensor, _: Any) -> tuple[Tensor, Tensor]:
    """Whether each token is guessed right, and its weight."""
    return (output.argmax(-1) == labels).float(), (labels != NO_LABEL).float()


SCORINGS: Mapping[str, Scoring] = {
    # Accuracy; means over classes of accuracy and F1; Matthews' correlation of labels and guesses.
    "classification": Scoring(
        _of_classes,
        lambda output, labels, _: (output, labels),
        macro=("balanced_accuracy", "f1"),
    ),
    "regression": Scoring(
        _of_numbers,
        lambda output, labels, _: (output.squeeze(-1), labels),
        ("pearson", "spearman"),
    ),
    # A class with a probability of 1/2 or more is guessed; means over classes, except `micro_f1`.
    "multi-label": Scoring(
        _of_several,
        lambda output, labels, _: (output.sigmoid(), labels.long()),
        ("mean_average_precision",),
        ("f1",),
    ),
    # Precision, recall and F1 of entities; the accuracy of tokens.
    "token-classification": Scoring(
        _of_tags, lambda output, labels, _: (output.argmax(-1), labels)
    ),
    # `mean_iou`: the mean over classes of intersection over union.
    "segmentation": Scoring(
        _of_pixels, lambda output, labels, _: (output.argmax(1), labels), macro=("mean_iou",)
    ),
    "detection": Scoring(_of_objects, lambda *batch: batch),
    **dict.fromkeys(LANGUAGE, Scoring(_of_tokens, _right)),
}


def _in_step(batches: Iterable[Batch], device: torch.device) -> Iterator[tuple[Batch, bool]]:
    """The batches of this process, and whether each counts; all processes have equally many.

    A sharded model runs in all processes at once. So a process without more batches repeats its
    last one, which does not count.
    """
    remaining, batch = iter(batches), None
    while True:
        following = next(remaining, None)
        if not processes.most(following is not None, device):
            return
        batch = batch if following is None else following
        assert batch is not None
        yield batch, following is not None


def _by_class(classes: int, ignored: int | None = None, of: str = "Multiclass") -> dict[str, Any]:
    """Metrics with a value for each class; MetricCollection computes shared counts once.

    of: prefix of torchmetrics' classes; only "Multiclass" has a confusion matrix.
    """
    from torchmetrics import classification as kinds

    names = {"counts": "StatScores", "precision": "Precision", "recall": "Recall", "f1": "F1Score"}
    metrics: dict[str, Any] = {
        BY_CLASS + name: getattr(kinds, of + kind)(classes, average="none", ignore_index=ignored)
        for name, kind in names.items()
    }
    if classes <= MOST and of == "Multiclass":
        confusion = kinds.MulticlassConfusionMatrix(classes, ignore_index=ignored)
        metrics[BY_CLASS + "confusion"] = confusion
    return metrics
