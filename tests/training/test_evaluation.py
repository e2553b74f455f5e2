"""The figures of an evaluation, against ones counted by hand."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from razorctl import Recipe, sparsify
from razorctl.config.job import Job
from razorctl.errors import FigureError
from razorctl.layers.heads.pixel_logits import Enlarged
from razorctl.step import ByLogits
from razorctl.training.evaluation import evaluate

JOB = Job("m", "d", precision="fp32")


def call(model, inputs):
    return model(inputs)


def names(count):
    return [*map(str, range(count))]


def of(output, labels, *, size=3, job=JOB):
    """The figures of a model that puts out `output`, over batches of `size` rows."""
    rows = torch.arange(len(labels))
    batches = [(part, labels[part]) for part in rows.split(size)]
    model = nn.Dropout()
    losses = ByLogits(lambda model, rows: output[rows], job)
    evaluation = evaluate(model, losses, batches, names(output.shape[1]))
    assert not model.training
    return evaluation


def test_by_hand():
    # Of class 0 three of four are right, of class 1 one of two, of class 2 none of one.
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    guesses = torch.tensor([0, 0, 0, 1, 1, 0, 0])
    output = 9.0 * nn.functional.one_hot(guesses, 3)
    evaluation = of(output, labels)
    figures = evaluation.figures
    assert figures["accuracy"] == pytest.approx(4 / 7)
    assert figures["balanced_accuracy"] == pytest.approx((3 / 4 + 1 / 2 + 0) / 3)
    f1 = (2 * 3 / (2 * 3 + 2 + 1), 2 * 1 / (2 * 1 + 1 + 1), 0)  # 2 tp / (2 tp + fp + fn)
    assert figures["f1"] == pytest.approx(sum(f1) / 3)
    assert figures["loss"] == pytest.approx(nn.functional.cross_entropy(output, labels).item())
    assert "top5_accuracy" not in figures
    by_class = evaluation.by_class
    assert by_class.labels == [4, 2, 1]
    assert by_class.precision == pytest.approx([3 / 5, 1 / 2, 0])
    assert by_class.recall == pytest.approx([3 / 4, 1 / 2, 0])
    assert by_class.f1 == pytest.approx(f1)
    assert by_class.confusion == [[3, 1, 0], [1, 1, 0], [1, 0, 0]]


# Task -> logits of six rows, and their labels.
OUTPUTS = {
    "classification": (torch.zeros(6, 3), torch.tensor([0, 1, 2] * 2)),
    "regression": (torch.arange(6.0)[:, None], torch.arange(6.0)),
    "multi-label": (torch.zeros(6, 3), torch.eye(3).repeat(2, 1)),
    "token-classification": (torch.zeros(6, 5, 3), torch.zeros(6, 5).long()),
    "segmentation": (torch.zeros(6, 3, 4, 4), torch.zeros(6, 4, 4).long()),
    "causal-lm": (torch.zeros(6, 5, 7), torch.zeros(6, 5).long()),
    "masked-lm": (torch.zeros(6, 5, 7), torch.zeros(6, 5).long()),
}


@pytest.mark.parametrize("task", OUTPUTS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_is_not_finite_is_no_success(task, value):
    output, labels = OUTPUTS[task]
    job = replace(JOB, task=task)
    assert all(map(math.isfinite, of(output, labels, size=2, job=job).figures.values()))
    output = output.clone()
    output[4] = value  # in the last of three batches
    with pytest.raises(FigureError, match="loss of the evaluation is not finite; train again with"):
        of(output, labels, size=2, job=job)


def test_correlation_of_two_classes():
    labels, guesses = torch.tensor([1, 1, 1, 0, 0, 1]), torch.tensor([1, 1, 0, 0, 1, 1])
    tp, tn, fp, fn = 3, 1, 1, 1
    want = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert of(1.0 * nn.functional.one_hot(guesses), labels).figures["matthews"] == pytest.approx(
        want
    )


def test_top5():
    output = torch.arange(8.0).expand(4, 8)  # its guesses are 7, 6, 5, 4, 3
    figures = of(output, torch.tensor([7, 3, 2, 0])).figures
    assert (figures["top5_accuracy"], figures["accuracy"]) == (0.5, 0.25)


def test_correlations_of_numbers():
    output, labels = torch.tensor([[1.0], [2.0], [4.0], [3.0]]), torch.tensor([1.0, 3.0, 9.0, 4.0])
    figures = of(output, labels, job=replace(JOB, task="regression")).figures
    # Differences to the means: -1.5, -0.5, 1.5, 0.5 and -3.25, -1.25, 4.75, -0.25.
    want = (1.5 * 3.25 + 0.5 * 1.25 + 1.5 * 4.75 - 0.5 * 0.25) / math.sqrt(5 * 34.75)
    assert figures["pearson"] == pytest.approx(want)
    assert figures["spearman"] == pytest.approx(1)
    assert figures["mse"] == figures["loss"] == pytest.approx((0 + 1 + 25 + 1) / 4)
    assert figures["rmse"] == pytest.approx(math.sqrt(27 / 4))
    assert figures["mae"] == pytest.approx((0 + 1 + 5 + 1) / 4)
    assert figures["r2"] == pytest.approx(1 - 27 / 34.75)
    alike = of(torch.ones(4, 1), labels, job=replace(JOB, task="regression")).figures
    assert (alike["pearson"], alike["spearman"]) == (0, 0)  # not defined


def test_years_are_scored_in_more_than_16_bits():
    job = replace(JOB, task="regression", precision="bf16")
    rows, layer = torch.tensor([[0.0], [3.0]]), nn.Linear(1, 1)
    nn.init.ones_(layer.weight)
    nn.init.constant_(layer.bias, 1990.0)
    labels = torch.tensor([1990.0, 1993.5])
    figures = evaluate(layer, ByLogits(call, job), [(rows, labels)], ["year"]).figures
    assert figures["mse"] == 0.125
    assert figures["r2"] == pytest.approx(1 - 0.25 / 6.125)


def test_several_labels():
    output = torch.tensor([[2.0, -1.0], [1.0, 1.0], [-1.0, 3.0]])
    labels = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    evaluation = of(output, labels, job=replace(JOB, task="multi-label"), size=2)
    figures = evaluation.figures
    # Of class 0 the rows in their order are right, wrong, right; of class 1 right, right, wrong.
    assert figures["mean_average_precision"] == pytest.approx(((1 + 2 / 3) / 2 + 1) / 2)
    assert figures["f1"] == pytest.approx((1 / 2 + 1) / 2)
    assert figures["micro_f1"] == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))
    assert figures["exact_match"] == pytest.approx(1 / 3)
    want = nn.functional.binary_cross_entropy_with_logits(output, labels).item()
    assert figures["loss"] == pytest.approx(want)
    assert (evaluation.by_class.labels, evaluation.by_class.confusion) == ([2, 2], None)


def test_a_segmentation_model_is_evaluated_without_enlarged_logits(monkeypatch):
    model = nn.Sequential(nn.Conv2d(2, 3, 1))
    job = Job("m", "d", task="segmentation", precision="fp32")
    labels = torch.randint(3, (5, 8, 6))
    labels[:, :2] = -100
    batches = [(torch.randn(len(part), 2, 4, 3), part) for part in labels.split(2)]

    def logits(model, inputs):
        return nn.functional.interpolate(model(inputs), scale_factor=2, mode="bilinear")

    want = evaluate(model, ByLogits(logits, job), batches, names(3))
    sparsify(model, Recipe("head"))
    monkeypatch.setattr(Enlarged, "values", lambda self: pytest.fail("logits were enlarged"))
    found = evaluate(model, ByLogits(logits, job), batches, names(3))
    assert found.figures == pytest.approx(want.figures)
    assert found.by_class == want.by_class
    assert sum(found.by_class.labels) == 5 * 6 * 6  # without those of no class


# Task, labels of three rows, guesses, and means over the classes that labels have.
PRESENT = {
    "a class of no row that is guessed": (
        *("classification", [0, 0, 1], [0, 2, 1]),
        {"balanced_accuracy": (1 / 2 + 1) / 2, "f1": (2 / 3 + 1) / 2},
    ),
    "one class": (
        "classification",
        [0, 0, 0],
        [0, 0, 2],
        {"balanced_accuracy": 2 / 3, "f1": 4 / 5},
    ),
    "several labels": (
        *("multi-label", [[1, 0, 0], [1, 0, 0], [0, 1, 0]], [[1, 0, 1], [0, 0, 0], [0, 1, 0]]),
        {"f1": (2 / 3 + 1) / 2},
    ),
    "pixels": (
        "segmentation",
        [[[0, 0, 1, -100]]],
        [[[0, 2, 1, 2]]],
        {"mean_iou": (1 / 2 + 1) / 2},
    ),
}


@pytest.mark.parametrize("case", PRESENT)
def test_means_are_over_the_classes_that_rows_have(case):
    task, labels, guesses, figures = PRESENT[case]
    labels, guesses = torch.tensor(labels), torch.tensor(guesses)
    if task == "multi-label":
        output, labels = 18.0 * guesses - 9, labels.float()
    else:
        output = 9.0 * nn.functional.one_hot(guesses, 3).movedim(-1, 1)
    found = of(output, labels, job=replace(JOB, task=task)).figures
    assert {name: found[name] for name in figures} == pytest.approx(figures)
