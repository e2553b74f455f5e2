"""Evaluations that tests choose, and warnings that they see."""

import logging

import pytest

from razorctl.training.evaluation import Evaluation
from razorctl.training.run import Run


@pytest.fixture
def accuracies(monkeypatch):
    """Sets the accuracies of the evaluations to come."""

    def coming(*values: float) -> None:
        left = iter(values)
        monkeypatch.setattr(
            Run, "evaluation", lambda _: Evaluation({"accuracy": next(left), "loss": 1.0}, None)
        )

    return coming


@pytest.fixture
def warnings_are_seen(caplog):
    caplog.set_level(logging.WARNING)
