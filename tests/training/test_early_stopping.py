"""The metric by which weights are the best, and runs that end when it rises no more."""

import json
from dataclasses import replace

import pytest

from razorctl import data
from razorctl.errors import UsageError
from razorctl.training.evaluation import Evaluation
from razorctl.training.run import Run
from tests.training.runs import FULL, JOB, begin, resume, stop

MANY = replace(JOB, steps=9, evaluate_every=1, save_every=None, patience=2)


@pytest.fixture
def figures(monkeypatch):
    """Sets the figures of the evaluations to come."""

    def coming(*values):
        left = iter(values)
        monkeypatch.setattr(Run, "evaluation", lambda _: Evaluation(dict(next(left)), None))

    return coming


def rows(**columns):
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def test_a_run_ends_when_its_patience_does(tmp_path, accuracies):
    accuracies(0.1, 0.3, 0.2, 0.3, 0.9)
    run = begin(tmp_path / "run", MANY)
    list(run)
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["steps"], result["stopped_early"]) == (4, True)
    assert (result["best_step"], result["best_accuracy"]) == (4, 0.3)  # the newest of the best


def test_one_that_was_killed_as_it_ended_ends_when_resumed(tmp_path, accuracies):
    accuracies(0.3, 0.2, 0.1, 0.9)
    first = begin(tmp_path / "run", MANY, steps=3)
    stop(first)
    list(again := resume(tmp_path / "run", MANY))
    assert len(again.history) == 3
    assert again.result()["best_step"] == 1


@pytest.mark.parametrize(("metric", "best"), [("f1", 2), ("loss", 3), ("accuracy", 1)])
def test_the_metric_chooses_the_best_weights(metric, best, tmp_path, figures):
    figures(*rows(accuracy=(0.9, 0.5, 0.5), f1=(0.1, 0.8, 0.7), loss=(3.0, 2.0, 1.0)))
    run = begin(tmp_path / "run", replace(MANY, steps=3, metric=metric, patience=None))
    list(run)
    assert run.result()["best_step"] == best
    assert run.result()["metric"] == metric
    assert (tmp_path / "run/last").exists() == (best < 3)


def test_a_data_set_has_its_own_metric(tmp_path):
    assert data.find("cola").metric == "matthews"
    assert data.find("digits").metric is None
    assert begin(tmp_path / "run", JOB, FULL).metric == "accuracy"


def test_metrics_that_are_none():
    with pytest.raises(UsageError, match="unknown metric 'f2'; known: accuracy, "):
        replace(JOB, metric="f2")
