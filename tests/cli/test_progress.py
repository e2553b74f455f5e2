"""The lines of progress, of runs that are not trained."""

import io
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from razorctl.cli import progress
from razorctl.cli.views import common as views
from razorctl.cli.views.common import Pulse


@pytest.fixture
def said(monkeypatch):
    """The lines on stderr so far."""
    shown = io.StringIO()
    monkeypatch.setattr(views, "err", Console(file=shown, width=20))
    return lambda: shown.getvalue().splitlines()


class Steps(list):
    """A run of `count` steps, the last of which is evaluated."""

    def __init__(self, count: int) -> None:
        self.job, self.history, self.peak_bytes = SimpleNamespace(steps=count), [], None
        self.metric = "accuracy"
        super().__init__(
            SimpleNamespace(
                step=step,
                loss=1.0,
                accuracy=0.5 if step == count else None,
                metrics={"accuracy": 0.5, "perplexity": 12.34567} if step == count else None,
                samples_per_second=1000.0,
            )
            for step in range(1, count + 1)
        )


def test_a_line_for_each_tenth(said, monkeypatch):
    monkeypatch.setattr(progress, "APART", 0.0)
    run = Steps(25)
    progress._lines(run, run)
    steps = [int(line.split()[1]) for line in said()]
    assert steps == [3, 5, 8, 10, 13, 15, 18, 20, 23, 25]
    assert said()[-1] == "step 25 of 25: loss 1.00, accuracy 0.500, 1,000/s"
    assert said()[0].endswith(" left")


def test_a_line_has_the_figure_that_the_run_is_judged_by(said):
    run = Steps(5)
    run.metric = "perplexity"
    progress._lines(run, run)
    assert said()[-1] == "step 5 of 5: loss 1.00, accuracy 0.500, perplexity 12.35, 1,000/s"


def test_a_line_for_each_evaluation(said):
    run = Steps(25)
    for step in run[11:13]:
        step.accuracy, step.metrics = 0.25, {"accuracy": 0.25}
    run.peak_bytes = 3 << 30
    progress._lines(run, run)
    assert [line.split()[1] for line in said()] == ["12", "13", "25"]
    start = "step 12 of 25: loss 1.00, accuracy 0.250, 1,000/s, peak 3.0 GiB, "
    assert said()[0].startswith(start)


def test_the_last_word_again_after_a_silence(said, monkeypatch):
    monkeypatch.setattr(views, "EVERY", 0.05)
    with Pulse("loading") as pulse:
        deadline = time.monotonic() + 30
        while not said() and time.monotonic() < deadline:
            time.sleep(0.01)
        pulse.update("building")
        while len(said()) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    over = len(said())
    time.sleep(0.15)
    assert len(said()) == over
    assert said()[0].startswith("loading (")
    assert said()[-1].startswith("building (")
